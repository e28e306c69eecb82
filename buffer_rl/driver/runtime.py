"""The runtime with processes: calls go to Ray actors, or to local objects on a thread of their own.

Who waits for whom: coroutines wait for calls, each with a deadline; nothing waits for the event loop. An answer wakes
the loop from the thread that has it. Watchers (engine health, progress display) have a thread of their own, since they
ask other processes; the loop learns of their errors.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from buffer_rl.cluster.actor_group import ActorGroup
from buffer_rl.cluster.calling import Call
from buffer_rl.cluster.dispatch import Method, Ts
from buffer_rl.driver.tasks import NoAnswer, Task, run_to_end
from buffer_rl.plugin.calls import new_event_loop

R = TypeVar("R")

POLL_S = 1.0
"""Each look is a call or a request to several processes, which does not pay more often."""


class LocalTarget:
    """Calls on an object of this process, one after another on one thread.

    call: executes ``(method, *args)``; if it is left out, the object's method of that name is called.

    A daemon thread rather than an executor's: the interpreter joins executor threads when it ends, and a call may hang.
    """

    def __init__(self, role: str, obj: object, call: Callable[..., Any] | None = None) -> None:
        self.role = role
        self._call = call or (lambda method, *args: getattr(obj, method.__name__)(*args))
        self._calls: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name=role, daemon=True)
        self._thread.start()

    def start(self, method: Method[*Ts], *args: *Ts) -> Call:
        future: Future[Any] = Future()
        self._calls.put((future, partial(self._call, method, *args)))
        return Call(role=self.role, method=method.__name__, members=[self.role], futures=[future])

    def stop(self) -> None:
        """End the thread after the calls that were started; they are not waited for."""
        self._calls.put(None)

    def join(self, timeout_s: float) -> bool:
        """After ``stop``: wait for those calls, but not longer than ``timeout_s``. Whether they have ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


Target = ActorGroup | LocalTarget
"""Something that a role's calls go to."""
_Work = tuple[Future[Any], Callable[[], Any]]


def _work(calls: SimpleQueue[_Work | None]) -> None:
    while (call := calls.get()) is not None:
        future, execute = call
        try:
            future.set_result(execute())
        except BaseException as error:  # fault boundary: the error of a call is its answer
            future.set_exception(error)
        del call, future, execute  # an idle thread must not keep the last answer


class RayRuntime:
    """Implements ``buffer_rl.driver.tasks.Runtime``; its tasks are ``Call``s.

    watchers: called every ``poll_s`` seconds while the coroutine of ``run`` is at work; what one raises is passed on.
    """

    def __init__(self, targets: Mapping[str, Target], watchers: Sequence[Callable[[], None]] = ()) -> None:
        self.poll_s = POLL_S
        self._targets = dict(targets)
        self._watchers = list(watchers)

    def run(self, main: Callable[[], Coroutine[Any, Any, R]], look: Callable[[BaseException | None], None]) -> R:
        loop = new_event_loop()
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(loop, look, over), name="watchers", daemon=True)
        try:
            watch.start()
            if not _in_a_running_loop():
                return run_to_end(loop, main)
            return _run_in_a_thread(loop, main)
        finally:
            over.set()  # a watcher may hang, so its thread is not waited for

    def submit(self, role: str, method: Method[*Ts], *args: *Ts) -> Call:
        return self._targets[role].start(method, *args)

    async def answer(self, task: Task, timeout_s: float) -> Any:
        call = cast("Call", task)
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def look() -> None:
            if call.ended() and not ended.done():
                ended.set_result(None)

        def wake(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed: the answer came too late
                loop.call_soon_threadsafe(look)

        for future in call.futures:
            future.add_done_callback(wake)
        try:
            async with asyncio.timeout(timeout_s):
                await ended
        except TimeoutError:
            late = NoAnswer.of(call, timeout_s)
            del call, task, future  # an answer that comes later is not kept by the traceback of the error
            raise late from None
        return call.result()

    def restart(self, role: str) -> Call:
        """On a thread of its own: it waits until the new processes are ready. See ``ActorGroup.restart``."""
        target = LocalTarget(role, self._targets[role])
        call = target.start(ActorGroup.restart)
        target.stop()
        return call

    def now(self) -> float:
        return time.monotonic()

    def _watch(
        self, loop: asyncio.AbstractEventLoop, look: Callable[[BaseException | None], None], over: threading.Event
    ) -> None:
        while not over.wait(self.poll_s):
            error: BaseException | None = None
            try:
                for watcher in self._watchers:
                    watcher()
            except BaseException as caught:  # passed on to the loop
                error = caught
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(look, error)
            if error is not None:
                return


def _in_a_running_loop() -> bool:
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


def _run_in_a_thread(loop: asyncio.AbstractEventLoop, main: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """The same, if this thread runs an event loop already, as in a notebook."""
    target = LocalTarget("driver", partial(run_to_end, loop, main))
    (answer,) = target.start(partial.__call__).futures
    target.stop()
    try:
        return cast("R", answer.result())
    except BaseException:
        with suppress(RuntimeError):  # it has ended by itself
            loop.call_soon_threadsafe(loop.stop)
        target.join(threading.TIMEOUT_MAX)
        raise
