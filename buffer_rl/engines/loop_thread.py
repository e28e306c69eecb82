"""An event loop in a thread of its own, for synchronous code that keeps connections open between its calls."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a thread of its own from the first call on, so that connections outlive a call.

    The thread is a daemon: it ends with ``stop``, when the object is collected, or with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: weakref.finalize[Any, LoopThread] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and not ended."""
        return self._loop is not None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's answer. It must have a deadline of its own. Callable from every thread but the loop's.

        Raises ``concurrent.futures.CancelledError`` where ``stop`` comes first."""
        with self._lock:  # so that it is asked for before the end, and cancelled by it
            answer = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        return answer.result()

    def stop(self) -> None:
        """End the thread, if it was started; a later ``run`` starts another one."""
        with self._lock:
            if self._end is not None:
                self._end()
            self._loop = self._end = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop, ended = asyncio.new_event_loop(), asyncio.Event()
            threading.Thread(target=_run_until, args=(self._loop, ended), name=self._name, daemon=True).start()
            self._end = weakref.finalize(self, self._loop.call_soon_threadsafe, ended.set)
            self._end.atexit = False
        return self._loop


def _run_until(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cancels what still runs, so that no caller waits for it
        runner.run(_waited(ended))


async def _waited(ended: asyncio.Event) -> None:
    await ended.wait()
