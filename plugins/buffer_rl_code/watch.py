"""What the processes of a sandbox use, read in ``/proc`` from outside, and how they are ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_BYTES_OF_A_FILE = 1 << 14  # more than the kernel holds of an empty one, as making and removing it takes long, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of a tree of processes. cpu_s: with that of its processes that have ended. waits: none of them runs or waits for
    a core. memory_bytes: with temporary files, empty ones too."""

    cpu_s: float
    waits: bool
    memory_bytes: int


def usage_of(root: int, folders: Sequence[str] = ()) -> Usage:
    """The usage of ``root`` and of all that descend from it. Processes that end meanwhile are left out.

    folders: the temporary file systems that they have, as they see them.
    """
    cpu, memory, files, waits = 0, 0, 0, True
    for pid in descendants(root):
        files = max(files, sum(_held_by(pid, name) for name in folders))
        folder = Path("/proc", str(pid))
        with suppress(OSError, IndexError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            pages = int((folder / "statm").read_text().split()[1])
            cpu += sum(map(int, fields[11:15]))  # user and system time, its own and that of children it waited for
            memory += pages * _PAGE
            waits = waits and fields[0] != "R"
    return Usage(cpu_s=cpu / _TICKS, waits=waits, memory_bytes=memory + files)


def _held_by(pid: int, folder: str) -> int:
    """Bytes of the temporary file system ``folder`` of a process; 0 if it is that of this process, or out of reach.
    Memory limits count none of them, and bwrap limits the size but not the number of files."""
    path = f"/proc/{pid}/root{folder}"
    try:
        if os.stat(path).st_dev == os.stat(folder).st_dev or os.path.samefile(f"/proc/{pid}/root", "/"):
            return 0
        held = os.statvfs(path)
    except OSError:
        return 0
    return (held.f_blocks - held.f_bfree) * held.f_frsize + (held.f_files - held.f_ffree) * _BYTES_OF_A_FILE


def descendants(root: int) -> list[int]:
    """``root`` and the processes that descend from it. An orphan is a child of the sandbox's own first process."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += _children(pid)
    return found


def has_ended(child: int) -> bool:
    """Whether a child of this process has ended; it stays to be reaped."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_tree(root: int) -> None:
    """Kill a child of this process with the first process of its namespace, and so with all that is in it."""
    for pid in [*_children(root), root]:  # root is not reaped yet: its number, and those below it, are not used again
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            found += map(int, Path(task.path, "children").read_text().split())
    return found
