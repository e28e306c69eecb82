"""The one thread that owns the scheduler and the model.

The server's event loop puts commands into ``_inbox``; the thread handles them between steps and posts results,
one wake-up of the event loop a step. While nothing can be decoded the thread blocks on the inbox. An update of the
weights of an engine that is not paused waits for the running requests; the thread admits no new ones meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from buffer_rl.embedded.scheduler import Request, Scheduler
from buffer_rl.embedded.streams import Stream

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROGRESS_S = 0.5
"""In which a thread that computes uses its CPU clock."""


@dataclass(slots=True)
class _Call:
    function: Callable[[], Any]
    reply: asyncio.Future[Any]
    when_drained: bool = False


class EngineThread:
    """Runs ``scheduler.step`` while there is work.

    on_finished: called in the event loop with requests that finished. on_failure: called in the event loop with
    the exception if a step raises; the thread has then ended. compute_cpu_s: CPU-seconds of this thread in steps, which
    are those of the mathematics where torch has one thread. streams: hear of new tokens after each step; set it from
    the event loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        on_finished: Callable[[list[Request]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.scheduler = scheduler
        self.failure: BaseException | None = None
        self.compute_cpu_s = 0.0
        self.streams: tuple[Stream, ...] = ()
        self._on_finished = on_finished
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Sequence[Request] | _Call | None] = queue.SimpleQueue()
        self._drained: list[_Call] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; call it in the event loop that results go to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after the step in progress."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all before the same step; ``on_finished`` gets them back."""
        self._inbox.put(requests)

    def call(self, function: Callable[[], T], *, when_drained: bool = False) -> asyncio.Future[T]:
        """Run ``function`` in the thread, between steps; ``when_drained``: only once nothing is running, unless the
        engine is paused. The future, which need not be awaited, has its result or its exception."""
        assert self._loop is not None
        reply: asyncio.Future[T] = self._loop.create_future()
        if self.failure is not None:
            raise RuntimeError(f"the engine has failed: {self.failure}")
        self._inbox.put(_Call(function, reply, when_drained))
        return reply

    async def answer_or_progress(self, function: Callable[[], T]) -> T:
        """``call``, or the result of ``function`` in this loop once the thread is seen to compute: a step may take
        minutes. It waits for a thread that neither answers nor computes."""
        reply = self.call(function)
        while True:
            before = self._cpu_s()
            await asyncio.wait([reply], timeout=PROGRESS_S)
            if reply.done():
                return reply.result()
            if self._cpu_s() > before:
                return function()

    def _cpu_s(self) -> float:
        """CPU-seconds of the thread; it is alive."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident)) if self._thread.is_alive() else 0.0

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            while self._handle_inbox():
                if self.scheduler.has_work:
                    began = time.thread_time()
                    finished = self.scheduler.step()
                    self.compute_cpu_s += time.thread_time() - began
                    self.post_finished(finished)
                    if streams := self.streams:
                        self._post(_grow, [(stream, stream.lengths()) for stream in streams])
                self._run_drained()
        except BaseException as error:  # fault boundary: whatever ends the thread must reach the waiting requests
            logger.exception("the engine thread has failed")
            self.failure = error
            self._post(self._fail, error)

    def _handle_inbox(self) -> bool:
        """Handle what is in the inbox, waiting for something if there is nothing else to do; False to end."""
        block = not self.scheduler.has_work
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if item is None:
                return False
            if not isinstance(item, _Call):
                for request in item:
                    self.scheduler.add(request)
            elif item.when_drained:
                self._drained.append(item)
                self.scheduler.draining = True
            else:
                self._perform(item)

    def _run_drained(self) -> None:
        if self._drained and (self.scheduler.paused or not self.scheduler.num_running):
            calls, self._drained = self._drained, []
            for call in calls:
                self._perform(call)
            self.scheduler.draining = False

    def _perform(self, call: _Call) -> None:
        try:
            result = call.function()
        except Exception as error:  # fault boundary: the caller in the event loop gets the exception
            self._post(_set, call.reply, None, error)
        else:
            self._post(_set, call.reply, result, None)

    def post_finished(self, finished: list[Request]) -> None:
        """Report finished requests; call it in the thread, as from a function run by ``call``."""
        if finished:
            self._post(self._on_finished, finished)

    def _post(self, function: Callable[..., None], *values: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *values)

    def _fail(self, error: BaseException) -> None:
        """In the event loop: fail every call that waits for the ended thread."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, _Call):
                self._drained.append(item)
        for call in self._drained:
            _set(call.reply, None, RuntimeError(f"the engine has failed: {error}"))
        self._drained = []
        self._on_failure(error)


def _set(reply: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if reply.done():
        return
    if error is None:
        reply.set_result(result)
    else:
        reply.set_exception(error)


def _grow(lengths: list[tuple[Stream, list[int]]]) -> None:
    for stream, counts in lengths:
        stream.grow(counts)
