"""What the processes of a sandbox use, read in ``/proc`` from outside, and how they are ended."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of a tree of processes. cpu_s: with that of its processes that have ended. queued_s: how long its processes
    waited for a core; 0 on kernels that do not count it."""

    cpu_s: float
    queued_s: float
    memory_bytes: int


def usage_of(root: int) -> Usage:
    """The usage of ``root`` and of all that descend from it. Processes that end meanwhile are left out."""
    cpu, queued, memory = 0, 0, 0
    for pid in descendants(root):
        folder = Path("/proc", str(pid))
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            pages = int((folder / "statm").read_text().split()[1])
            cpu += sum(map(int, fields[11:15]))  # user and system time, its own and that of children it waited for
            memory += pages * _PAGE
            queued += int((folder / "schedstat").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            continue
    return Usage(cpu_s=cpu / _TICKS, queued_s=queued / 1e9, memory_bytes=memory)


def descendants(root: int) -> list[int]:
    """``root`` and the processes that descend from it. An orphan is a child of the sandbox's own first process."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += _children(pid)
    return found


def end_tree(root: int) -> None:
    """Kill a child of this process with the first process of its namespace, and so with all that is in it."""
    for pid in [*_children(root), root]:  # root is not reaped yet: its number, and those below it, are not used again
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            found += map(int, Path(task.path, "children").read_text().split())
    except OSError:
        return found
    return found
