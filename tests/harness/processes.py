"""Which processes descend from a process, for tests that nothing stays behind. Reads ``/proc``, so Linux only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process as it was seen. ``command`` is its command line, or its title where it set one."""

    pid: int
    parent: int
    command: str

    def alive(self) -> bool:
        """Whether it is still there, and no zombie; a later process of the same id does not count."""
        now = _read(Path("/proc", str(self.pid)))
        return now is not None and now.command == self.command


def descendants(pid: int) -> list[Process]:
    """Children of ``pid``, their children and so on, without zombies; ``pid`` itself is not among them."""
    table = [process for folder in Path("/proc").glob("[0-9]*") if (process := _read(folder)) is not None]
    found: list[Process] = []
    parents = {pid}
    while parents:
        generation = [process for process in table if process.parent in parents]
        found += generation
        parents = {process.pid for process in generation}
    return found


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    return _read(Path(f"/proc/{pid}")) is not None


def holds_within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` comes true before ``timeout_s`` have passed."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _read(folder: Path) -> Process | None:
    try:
        state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # it ended meanwhile
        return None
    return None if state == "Z" else Process(pid=int(folder.name), parent=int(parent), command=words)
