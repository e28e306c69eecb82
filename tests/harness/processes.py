"""What tests ask of processes, beside what a drill does. Reads ``/proc``, so Linux only."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from buffer_rl.verbs.drill.faults import Process as Process
from buffer_rl.verbs.drill.faults import descendants as descendants
from buffer_rl.verbs.drill.faults import read_process

POLL_S = 0.05


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    return read_process(Path(f"/proc/{pid}")) is not None


def holds_within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` comes true before ``timeout_s`` have passed."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
