"""How the ranks of a trainer meet: at the start, before each forward pass that needs several of them, and in sums.

Torch is imported where ranks meet: the driver imports this module, and starts seconds earlier without.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from buffer_rl.cluster.environment import set_variables
from buffer_rl.errors import BufferRLError, TrainError
from buffer_rl.observe.pulse import Waits, waiting
from buffer_rl.records.groups import Topology

if TYPE_CHECKING:
    import torch


def most_of(count: int, device: torch.device, group: Any = None) -> int:
    """The largest ``count`` of all ranks of a group, by default of all ranks. Each of them calls this."""
    import torch
    import torch.distributed as dist

    most = torch.tensor(count, device=device)
    with waiting(Waits.PEERS):
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return int(most)


class Peers:
    """The ranks whose forward passes have collectives with this rank's: those of its replica, or all of them where
    replicas work in step.

    Every rank constructs it, once the trainers are built. Raises TrainError, on all ranks, unless these form
    ``dp_size`` replicas with one head each.
    """

    def __init__(self, place: Topology) -> None:
        import torch.distributed as dist

        self._group: Any = None
        self._where = f"a peer in replica {place.dp_rank}"
        if not dist.is_initialized():
            check_topologies([place])
            return
        places: list[Any] = [None] * dist.get_world_size()
        with waiting(Waits.PEERS):
            dist.all_gather_object(places, place)
        check_topologies(places)
        ranks = range(len(places))
        replicas = [[rank for rank in ranks if places[rank].dp_rank == number] for number in range(place.dp_size)]
        for members in [list(ranks)] if place.in_step else replicas:
            group = dist.new_group(members)  # every rank takes part in making every group
            if dist.get_rank() in members and len(members) > 1:
                self._group = group

    def meet(self, error: BufferRLError | None) -> None:
        """Wait for the peers before work that has collectives. Raises ``error``, if there is one, or TrainError where a
        peer has one: else the others would wait in a collective for a rank that has left."""
        if self._group is not None:
            import torch
            import torch.distributed as dist

            failed = torch.tensor(float(error is not None), device=_device())
            with waiting(Waits.PEERS):
                dist.all_reduce(failed, group=self._group)
                any_failed = bool(failed)
            if error is None and any_failed:
                raise TrainError("another rank cannot go on", where=self._where, hint="its own error says why")
        if error is not None:
            raise error


def check_topologies(places: Sequence[Topology]) -> None:
    """Raises TrainError unless the ranks form ``dp_size`` replicas with one head each, all in step or none."""
    sizes, steps = {place.dp_size for place in places}, {place.in_step for place in places}
    heads = sorted(place.dp_rank for place in places if place.is_head)
    if len(sizes) != 1 or len(steps) != 1 or heads != list(range(min(sizes))):
        what = f"the heads of the trainer's ranks are of the replicas {heads}, dp_size is {sorted(sizes)}"
        expected = "one dp_size and in_step on all ranks, and one head in each replica 0 to dp_size - 1"
        raise TrainError(what, where="topology of --train-backend", expected=expected)


def summed_over_ranks(numbers: Sequence[float]) -> list[float]:
    """Each number's sum over all ranks, in float64; every rank calls it."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.float64, device=_device())
    with waiting(Waits.PEERS):
        dist.all_reduce(tensor)
        return [float(number) for number in tensor.tolist()]


def _device() -> str:
    import torch.distributed as dist

    return "cuda" if dist.get_backend() == "nccl" else "cpu"


class Rendezvous:
    """The socket of rank 0 at which the ranks meet, on the address of its node alone.

    Every rank may call ``open``; all call ``join``, with what rank 0's returned.

    Torch's own listener would be on all interfaces, without authentication. This one listens before its port is
    announced, so no other process can take the port in between.
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
        import torch.distributed as dist

        if _is_loopback(address) and sys.platform == "linux":
            set_variables({"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")})  # else of its name
        listener, self._listener = self._listener, None
        if listener is not None and rank != 0:
            listener.close()
        store = cast("Any", dist).TCPStore(
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
