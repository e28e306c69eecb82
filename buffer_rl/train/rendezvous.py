"""Where a run's trainer ranks meet: a socket of rank 0, on the address of its node alone."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist


class Rendezvous:
    """Every rank may call ``open``; all call ``join``, with what rank 0's returned.

    Torch's own listener would be on all interfaces, and asks nobody who they are. This one is taken before its port is
    told to anybody, so no other process can take the port in between.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def open(self, address: str) -> tuple[str, int]:
        """Listen on ``address``, at a free port. Returns both."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        return address, int(self._listener.getsockname()[1])

    def join(self, backend: str, address: str, port: int, *, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make the default process group of all ranks; returns when they have met."""
        if _is_loopback(address) and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else that of the machine's name
        listener, self._listener = self._listener, None
        if listener is not None and rank != 0:
            listener.close()
        store = cast(Any, dist).TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None and rank == 0 else None,
        )
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
