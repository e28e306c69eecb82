"""What must be on one machine: the trainer and the engines, if weights go through shared memory."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from buffer_rl.errors import ConfigError


def has_memory_files() -> bool:
    """Whether this system has anonymous memory files, as Linux does."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def machine_id() -> str:
    """What two processes share exactly if one sees the other in ``/proc``: the kernel's boot and process numbers. Empty
    without ``/proc``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_this_machine(host: str) -> bool:
    """Whether ``host``, a name or an address, has an address of this machine: exactly those can be bound to."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def require_local_engines(mode: str, urls: Sequence[str]) -> None:
    """Raises ConfigError if weights go by shared memory and an engine is on another machine, or this system has no
    such memory."""
    if mode != "tensor":
        return
    if not has_memory_files():
        what = "weights through shared memory need Linux"
        raise ConfigError(what, where="--weight-sync-mode tensor", hint="use --weight-sync-mode disk")
    for url in urls:
        if not is_this_machine(urlsplit(url).hostname or ""):
            what = f"the engine {url} is not on this machine, so it cannot read the trainer's memory"
            hint = "use --weight-sync-mode disk, with --update-weight-disk-dir on a file system that the engines see"
            raise ConfigError(what, where="--weight-sync-mode tensor and --engine-urls", hint=hint)


def require_local_trainer(mode: str, host: str) -> None:
    """Raises ConfigError if weights go by shared memory and the trainer's rank 0 runs on another machine."""
    if mode == "tensor" and not is_this_machine(host):
        what = f"the trainer runs on {host}, so the engines here cannot read its memory"
        hint = "use --weight-sync-mode disk, with --update-weight-disk-dir on a file system that both see"
        raise ConfigError(what, where="--weight-sync-mode tensor and --ray-address", hint=hint)


def _can_bind(family: int, address: object) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
        probe.bind(address)  # type: ignore[arg-type]  # getaddrinfo made it for this family
        return True
    return False
