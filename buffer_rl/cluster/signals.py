"""Signals that end a run or a command: one exception for all, so that everything is taken down."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from buffer_rl.errors import EndedBySignal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, kill and schedulers, a closed terminal
ENDING_BY_DEFAULT = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # of schedulers; others may handle them


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raise EndedBySignal in the main thread for a signal that ends the process, for the length of the block.

    A signal that the caller ignores stays ignored, as SIGHUP under ``nohup`` and SIGINT in a script's background jobs.
    Outside the main thread, where Python allows no handlers, all signals keep their meaning.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*ENDING, *ENDING_BY_DEFAULT)}
    ours = {
        number: handler
        for number, handler in before.items()
        if handler is not signal.SIG_IGN and (number in ENDING or handler is signal.SIG_DFL)
    }
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    raise EndedBySignal(number)
