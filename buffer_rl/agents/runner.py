"""Runs agents off the rollout worker's event loop, so that no agent holds up a request: ``async`` ones in an event loop
of their own, plain ones each in a thread.

An agent that blocks the loop of the others is named after a few seconds. If it is still at it at its deadline, its loop
is left behind with it: the other agents there have failed and are played again, in a new loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from buffer_rl.errors import RolloutError
from buffer_rl.plugin.calls import contained, contained_task
from buffer_rl.rollout.user_functions import is_async

_log = logging.getLogger(__name__)
BLOCKED_S = 5.0
"""An event loop that answers nothing for longer is blocked, and its agent is named."""
ANSWER_S = 1.0
"""The same at an agent's deadline."""


class AgentTimeoutError(Exception):
    """An agent's deadline has passed."""


@dataclass(slots=True, eq=False)
class _Loop:
    """An event loop in a thread. running: the agents in it, with the names that they have in messages."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    running: dict[Future[Any], str] = field(default_factory=dict)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.loop.run_forever, name="agents", daemon=True)
        self.thread.start()

    async def answers(self, timeout_s: float) -> bool:
        """Whether the loop does something that it is asked to do within ``timeout_s``."""
        here = asyncio.get_running_loop()
        answered = here.create_future()

        def answer() -> None:
            if not answered.done():
                answered.set_result(None)

        self.loop.call_soon_threadsafe(here.call_soon_threadsafe, answer)
        done, _ = await asyncio.wait([answered], timeout=timeout_s)
        return bool(done)

    def blocker(self) -> str:
        """The agent that runs now, and where."""
        task = asyncio.current_task(self.loop)
        frame = sys._current_frames().get(self.thread.ident or 0)
        line = traceback.extract_stack(frame)[-1] if frame is not None else None
        at = f" at {line.filename}:{line.lineno} ({line.name})" if line else ""
        return f"{task.get_name() if task is not None else 'a callback'}{at}"


class AgentRunner:
    """The threads and the loop of one rollout worker's agents. Belongs to the worker's event loop."""

    def __init__(self) -> None:
        self._loop: _Loop | None = None
        self._watch: asyncio.Task[None] | None = None

    async def run(self, function: Callable[..., Any], *arguments: Any, name: str, timeout_s: float) -> Any:
        """What ``function(*arguments)`` returns, awaited if it is asynchronous.

        Raises what it raises, as subclasses of Exception alone, and AgentTimeoutError at the deadline. Then, or if the
        caller is cancelled, an asynchronous agent is cancelled, and a plain one is left to itself."""
        asynchronous = is_async(function)
        future = self._in_loop(function, arguments, name) if asynchronous else _in_thread(function, arguments)
        loop, caller = self._loop if asynchronous else None, asyncio.current_task()
        assert caller is not None
        before = caller.cancelling()
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if caller.cancelling() > before or not future.cancelled():
                raise
            raise RolloutError("it cancelled itself", where=name) from None
        except TimeoutError as error:
            if not deadline.expired():
                raise
            if loop is not None and loop is self._loop and not await loop.answers(ANSWER_S):
                self._leave(loop, future)
            raise AgentTimeoutError(f"{name} was not done within {timeout_s:g} s") from error
        finally:
            if loop is not None:
                loop.running.pop(future, None)

    async def aclose(self) -> None:
        """Stop the loop; threads of plain agents end with the process."""
        if self._watch is not None:
            self._watch.cancel()
        if self._loop is not None:
            self._loop.loop.call_soon_threadsafe(self._loop.loop.stop)

    def _in_loop(self, function: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> Future[Any]:
        if self._loop is None:
            self._loop = _Loop()
            if self._watch is None:
                self._watch = asyncio.get_running_loop().create_task(self._watch_loop())
        context = contextvars.copy_context()

        async def named() -> Any:
            task = asyncio.current_task()
            assert task is not None
            task.set_name(name)
            return await function(*arguments)

        future: Future[Any] = context.run(asyncio.run_coroutine_threadsafe, contained_task(named()), self._loop.loop)
        self._loop.running[future] = name
        return future

    async def _watch_loop(self) -> None:
        named: _Loop | None = None
        while True:
            await asyncio.sleep(BLOCKED_S)
            watched = self._loop
            if watched is None or not watched.running or await watched.answers(BLOCKED_S):
                named = None
            elif named is not watched:
                named = watched
                _log.warning(
                    "%s has blocked the event loop of all agents for %g s: await there, or write a plain `def` agent, "
                    "which has a thread of its own",
                    watched.blocker(),
                    BLOCKED_S,
                )

    def _leave(self, loop: _Loop, future: Future[Any]) -> None:
        """Leave a loop behind with the agent that blocks it; the others there have failed."""
        self._loop = None
        what = f"{loop.blocker()} blocked the event loop of all agents"
        for other in loop.running:
            if other is not future:
                with contextlib.suppress(Exception):  # it ended in this moment
                    other.set_exception(RolloutError(what, hint="await in async agents"))


def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
    future: Future[Any] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            with contained():
                answer = context.run(function, *arguments)
        except Exception as error:  # fault boundary: the agent is the user's
            answer, failed = error, True
        else:
            failed = False
        with contextlib.suppress(Exception):  # its deadline has passed
            future.set_exception(answer) if failed else future.set_result(answer)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return future
