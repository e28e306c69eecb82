"""Runs agents off the rollout worker's event loop, so that no agent holds up a request: ``async`` ones in an event loop
of their own, plain ones each in a thread.

An agent that blocks the loop of the others is named after a few seconds. If the loop is blocked at the deadline of an
agent, it is left behind: the agent that blocks it stays there until its own deadline, and the others have failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from buffer_rl.agents.session import Session, SessionHandle
from buffer_rl.args import Args
from buffer_rl.errors import RolloutError
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.calls import contained_task, in_thread, new_event_loop
from buffer_rl.records.groups import Sample
from buffer_rl.rollout.user_functions import is_async

_log = logging.getLogger(__name__)
BLOCKED_S = 5.0
"""An event loop that answers nothing for longer is blocked, and its agent is named."""
ANSWER_S = 1.0
"""The same at an agent's deadline."""
PACKAGE = Path(__file__).resolve().parents[1]
ENDS_S = 1.0
"""How long the loop of agents may take to end."""


class AgentTimeoutError(Exception):
    """An agent's deadline has passed. name: the agent's."""

    def __init__(self, name: str, timeout_s: float) -> None:
        super().__init__(f"{name} was not done within {timeout_s:g} s")


@contextlib.asynccontextmanager
async def deadline(name: str, timeout_s: float) -> AsyncIterator[None]:
    """A block for which an agent has so long. Raises AgentTimeoutError at its end."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except OSError as error:  # a TimeoutError, or what was raised because of it
        if not limit.expired():
            raise
        raise AgentTimeoutError(name, timeout_s) from error


@dataclass(slots=True, eq=False)
class AgentLoop:
    """An event loop in a thread. running: the agents in it, by the names that they have in messages. names: of the
    agents that started the tasks in it, directly or not."""

    loop: asyncio.AbstractEventLoop = field(default_factory=new_event_loop)
    running: dict[Future[Any], str] = field(default_factory=dict)
    names: WeakKeyDictionary[asyncio.Task[Any], str] = field(default_factory=WeakKeyDictionary)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.loop.set_task_factory(self._named_task)
        self.thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.loop.run_forever()
        if tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

    async def answers(self, timeout_s: float) -> bool:
        """Whether the loop does something that it is asked to do within ``timeout_s``."""
        here, answered = asyncio.get_running_loop(), asyncio.Event()
        self.loop.call_soon_threadsafe(here.call_soon_threadsafe, answered.set)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answered.wait(), timeout_s)
        return answered.is_set()

    def blocker(self) -> tuple[str, str]:
        """The agent that runs now, empty if it is unknown, and its innermost line outside of libraries."""
        task = asyncio.current_task(self.loop)
        lines = lines_of(self.thread)
        own = [line for line in lines if not line.filename.startswith(_libraries())] or lines
        at = f" at {place_of(own[-1])}" if own else ""
        name = self.names.get(task, "") if task is not None else ""
        return name, f"{name or 'a callback'}{at}"

    def _named_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        parent = asyncio.current_task(loop)
        if parent is not None and parent in self.names:
            self.names[task] = self.names[parent]
        return task


def lines_of(thread: threading.Thread) -> list[traceback.FrameSummary]:
    """What ``thread`` runs now, the innermost line last."""
    frame = sys._current_frames().get(thread.ident or 0)
    return list(traceback.extract_stack(frame)) if frame is not None else []


def place_of(line: traceback.FrameSummary) -> str:
    """Its file, number and function."""
    return f"{line.filename}:{line.lineno} ({line.name})"


def _libraries() -> tuple[str, ...]:
    return tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Functions:
    """Runs an agent that is a function: ``agent``, in the threads and the loop of one rollout worker's agents. Belongs
    to the worker's event loop."""

    def __init__(
        self, agent: Callable[..., Any], args: Args, *, blocked_s: float = BLOCKED_S, answer_s: float = ANSWER_S
    ) -> None:
        self.blocking = not is_async(agent)
        self._agent, self._args = agent, args
        self._blocked_s, self._answer_s = blocked_s, answer_s
        self._loop: AgentLoop | None = None
        self._watch: asyncio.Task[None] | None = None
        self._hung: set[str] = set()

    async def run(self, session: Session, handle: SessionHandle, prompt: Sample, *, name: str) -> Any:
        """What the agent returns; see ``call``."""
        arguments, timeout_s = (user_args(self._args), prompt, handle), self._args.agent_timeout_s
        return await self.call(self._agent, *arguments, name=name, timeout_s=timeout_s)

    async def call(self, function: Callable[..., Any], *arguments: Any, name: str, timeout_s: float) -> Any:
        """What ``function(*arguments)`` returns, awaited if it is asynchronous.

        name: of the agent, different from that of others. Raises what it raises, as subclasses of Exception alone,
        AgentTimeoutError at the deadline, and RolloutError if another agent blocked its loop. Then, or if the caller is
        cancelled, an asynchronous agent is cancelled, and a plain one is left to itself."""
        asynchronous = is_async(function)
        thread: threading.Thread | None = None
        if asynchronous:
            future = self._in_loop(function, arguments, name)
        else:
            future, thread = in_thread("agent", function, *arguments)
        loop, caller = self._loop if asynchronous else None, asyncio.current_task()
        assert caller is not None
        before = caller.cancelling()
        try:
            async with deadline(name, timeout_s):
                return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if caller.cancelling() > before or not future.cancelled():
                raise
            raise RolloutError("it cancelled itself", where=name) from None
        except AgentTimeoutError:
            if loop is not None and loop is self._loop and not await loop.answers(self._answer_s):
                self._leave(loop, future)
            if thread is not None:
                self._name_hung(thread, name, timeout_s)
            raise
        finally:
            if loop is not None:
                loop.running.pop(future, None)

    async def aclose(self) -> None:
        """Stop the loop; threads of plain agents end with the process."""
        if self._watch is not None:
            self._watch.cancel()
        if self._loop is not None:
            self._loop.loop.call_soon_threadsafe(self._loop.loop.stop)
            await asyncio.to_thread(self._loop.thread.join, ENDS_S)

    def _in_loop(self, function: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> Future[Any]:
        if self._loop is None:
            self._loop = AgentLoop()
            if self._watch is None:
                self._watch = asyncio.get_running_loop().create_task(self._watch_loop())
        context, running = contextvars.copy_context(), self._loop

        async def named() -> Any:
            task = asyncio.current_task()
            assert task is not None
            running.names[task] = name
            return await function(*arguments)

        future: Future[Any] = context.run(asyncio.run_coroutine_threadsafe, contained_task(named()), running.loop)
        running.running[future] = name
        return future

    async def _watch_loop(self) -> None:
        named: AgentLoop | None = None
        while True:
            await asyncio.sleep(self._blocked_s)
            watched = self._loop
            if watched is None or not watched.running or await watched.answers(self._blocked_s):
                named = None
            elif named is not watched:
                named = watched
                _log.warning(
                    "%s has blocked the event loop of all agents for %g s: await there, or write a plain `def` agent, "
                    "which has a thread of its own",
                    watched.blocker()[1],
                    self._blocked_s,
                )

    def _name_hung(self, thread: threading.Thread, name: str, timeout_s: float) -> None:
        """Name the line of the user's in which a plain agent is at its deadline; each line once."""
        ours = (*_libraries(), str(PACKAGE))
        own = [line for line in lines_of(thread) if not line.filename.startswith(ours)]
        if own and (place := place_of(own[-1])) not in self._hung:
            self._hung.add(place)
            _log.warning("%s was at %s after %g s; its thread is left to itself", name, place, timeout_s)

    def _leave(self, loop: AgentLoop, future: Future[Any]) -> None:
        """Leave a loop behind with the agent that blocks it; the others there have failed.

        Raises RolloutError if the agent of ``future`` is one of these."""
        self._loop = None
        blocker, where = loop.blocker()
        blocked = RolloutError(f"{where} blocked the event loop of all agents", hint="await in async agents")
        for other, name in loop.running.items():
            if other is not future and name != blocker:
                with contextlib.suppress(InvalidStateError):  # it ended in this moment
                    other.set_exception(blocked)
        if blocker and loop.running[future] != blocker:
            raise blocked
