"""Processes that code in a thread has started and left behind: found by a mark, and ended.

The mark is a set of real-time signals that the thread blocks. Threads and processes inherit it from what starts them,
also a daemon whose parents have ended; nobody else blocks just these, and no program waits for them. What sets a
signal mask of its own is not found. Only Linux shows the masks of processes; elsewhere nothing is found.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

FIRST_SIGNAL, NUM_SIGNALS = 35, 30
"""The real-time signals that the C libraries leave to programs."""
ALL_MARKS = (1 << NUM_SIGNALS) - 1
HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
"""What ``multiprocessing`` starts once, for all threads of a process."""
GONE_S, POLL_S = 2.0, 0.01
SHOWN = 120
"""Characters of a command in a message."""


@dataclass(frozen=True, slots=True)
class Mark:
    """bits: one for each blocked signal. since: the id of the newest process when the mark was made; what has them is
    newer.

    Example:
        mark = Mark(); threading.Thread(target=lambda: (mark.put(), work())).start(); await mark.end_processes()
    """

    bits: int = field(default_factory=lambda: random.SystemRandom().randint(1, ALL_MARKS))
    since: int = field(default_factory=lambda: _newest_process())

    def put(self) -> None:
        """Mark the calling thread, and what it will start."""
        if sys.platform == "linux":
            own = {FIRST_SIGNAL + bit for bit in range(NUM_SIGNALS) if self.bits >> bit & 1}
            signal.pthread_sigmask(signal.SIG_BLOCK, own)

    def processes(self) -> dict[int, str]:
        """The running processes with this mark: their commands by id, or ``[name]`` without one, as in the moment in
        which a process becomes another program. Those that have ended and that nobody waited for are removed."""
        found = {}
        for pid in self._newer():
            with suppress(OSError, ValueError):
                name, state, bits = _status(pid)
                if bits != self.bits or pid == os.getpid():
                    continue
                if state in "ZX":
                    os.waitpid(pid, os.WNOHANG)  # raises OSError if it is another's child
                    continue
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    command = file.read(4096)
                if not any(helper in command for helper in HELPERS):
                    found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()[:SHOWN] or f"[{name}]"
        return found

    async def end_processes(self) -> dict[int, str]:
        """Kill the processes with this mark, until none is left or ``GONE_S`` have passed; their commands by id."""
        seen: set[int] = set()
        ended: dict[int, str] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                while running := self.processes():
                    for pid, command in running.items():
                        if pid in seen or not command.startswith("["):  # else it may become a helper in this moment
                            ended[pid] = command
                            with suppress(ProcessLookupError, PermissionError):
                                os.kill(pid, signal.SIGKILL)
                    seen |= running.keys()
                    await asyncio.sleep(POLL_S)
        return ended

    def _newer(self) -> Iterator[int]:
        """Process ids that were given since. They grow, and begin again at the system's limit."""
        newest = _newest_process()
        for name in os.listdir("/proc") if sys.platform == "linux" else ():
            if name.isdigit():
                pid = int(name)
                if (self.since < pid <= newest) if self.since <= newest else not newest < pid <= self.since:
                    yield pid


def _newest_process() -> int:
    """The id that was given last, also to a thread; 0 if the system does not tell."""
    with suppress(OSError, ValueError, IndexError), open("/proc/loadavg", "rb") as file:
        return int(file.read().split()[4])
    return 0


def _status(pid: int) -> tuple[str, str, int]:
    """Name, state and mark of a process. Raises OSError if it is gone, ValueError if the system does not tell."""
    with open(f"/proc/{pid}/status", "rb") as file:
        fields = dict(line.split(b":\t", 1) for line in file if b":\t" in line)
    if not {b"Name", b"State", b"SigBlk"} <= fields.keys():
        raise ValueError(f"the status of process {pid} is incomplete")
    name, state = fields[b"Name"].decode(errors="replace").strip(), fields[b"State"].decode()[:1]
    return name, state, int(fields[b"SigBlk"], 16) >> (FIRST_SIGNAL - 1) & ALL_MARKS
