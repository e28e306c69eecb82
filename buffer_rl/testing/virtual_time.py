"""A driver's runtime in virtual time: an event loop whose clock moves to the next timer if nothing else is left to do.

Days of a schedule pass in milliseconds, and equal runs are equal: timers of one moment go off in the order in which
they were set, and there are no threads.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from buffer_rl.cluster.dispatch import Method, Ts
from buffer_rl.driver.tasks import NoAnswer, Task, run_to_end

R = TypeVar("R")

Cost = Callable[[str, str, tuple[Any, ...]], float]
"""Virtual seconds of a call: ``(role, method, args) -> seconds``."""


class NothingLeft(RuntimeError):
    """Every coroutine waits, and nothing but deadlines will ever wake one."""


class _Timer(asyncio.TimerHandle):
    def __init__(self, order: int, when: float, callback: Any, args: Any, loop: Any, context: Any) -> None:
        super().__init__(when, callback, args, loop, context)
        self.order = order

    def __lt__(self, other: Any) -> bool:
        return bool((self.when(), self.order) < (other.when(), other.order))


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with a virtual clock. Raises NothingLeft, with what each coroutine waits for, if no ``sleep_until``
    is left while something is awaited."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._now = 0.0
        self._orders = itertools.count()
        self._sleeping = 0

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = _Timer(next(self._orders), when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    async def sleep_until(self, when: float) -> None:
        """Wait until a moment, of which it is known that it comes, unlike that of a deadline."""
        moment = asyncio.Event()
        cancel = self.call_at_last(when, moment.set)
        try:
            await moment.wait()
        finally:
            cancel()

    def call_at_last(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back at a moment of which it is known that it comes. Returns what cancels it."""
        self._sleeping += 1
        is_over = False

        def end(*, calls: bool) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._sleeping -= 1
                if calls:
                    callback()

        timer = self.call_at(when, lambda: end(calls=True))

        def cancel() -> None:
            timer.cancel()
            end(calls=False)

        return cancel

    def select(self, timeout: float | None) -> list[Any]:
        """As the loop's own selector: nothing is ready, so the clock moves on."""
        if timeout == 0:
            return []
        if not self._sleeping:
            raise NothingLeft("\n".join(["nothing is left to wait for:", *map(_waits, asyncio.all_tasks(self))]))
        self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        return []

    def _process_events(self, events: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def _waits(task: asyncio.Task[Any]) -> str:
    """The coroutines that a task is in, the outermost first, each with its line."""
    frames: list[str] = []
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None)
    return f"  {' > '.join(frames) or task.get_name()}"


@dataclass(slots=True, kw_only=True, eq=False)
class VirtualTask:
    """A call that ends at a moment of virtual time."""

    role: str
    method: str
    work: asyncio.Task[Any] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One call on the virtual time line; of one whose method is a coroutine, ``end`` is its start."""

    role: str
    method: str
    args: tuple[Any, ...]
    start: float
    end: float


class VirtualRuntime:
    """A ``buffer_rl.driver.tasks.Runtime`` without processes. Calls to one role follow one another; roles overlap.

    roles: an object for each role, whose methods are called. What a method changes is there at once, its answer when
    the time of its cost has passed; one that is a coroutine takes its own time, beside the role's other calls.
    ``spans`` lists every call in order of submission.
    """

    def __init__(self, roles: Mapping[str, Any], cost: Cost = lambda role, method, args: 0.0) -> None:
        self.loop = VirtualLoop()
        self.roles = dict(roles)
        self._cost = cost
        self._free_at: dict[str, float] = {}
        self._look: Callable[[BaseException | None], None] = lambda error: None
        self._changed = asyncio.Event()
        self.spans: list[Span] = []

    def run(self, main: Callable[[], Coroutine[Any, Any, R]], look: Callable[[BaseException | None], None]) -> R:
        self._look = look
        return run_to_end(self.loop, main)

    def look(self, error: BaseException | None = None) -> None:
        """What is watched beside calls is looked at now; with an error, it has failed."""
        self._look(error)

    def submit(self, role: str, method: Method[*Ts], *args: *Ts) -> VirtualTask:
        name = method.__name__
        start = max(self.now(), self._free_at.get(role, 0.0))
        end = start + self._cost(role, name, args)
        self.spans.append(Span(role=role, method=name, args=args, start=start, end=end))
        error: Exception | None = None
        answer: Any = None
        try:
            answer = getattr(self.roles[role], name)(*args)
        except Exception as caught:  # the boundary to the role: its error belongs to the task
            error = caught
        if not inspect.isawaitable(answer):
            self._free_at[role] = end
        self.tell()
        work = self.loop.create_task(self._answer_at(end, answer, error))
        return VirtualTask(role=role, method=name, work=work)

    def tell(self) -> None:
        """Something changed that ``until_changed`` waits for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until_changed(self) -> None:
        """Wait for the next call, or for what ``tell`` says."""
        await self._changed.wait()

    async def answer(self, task: Task, timeout_s: float) -> Any:
        mine = cast("VirtualTask", task)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(mine.work)
        except TimeoutError:
            raise NoAnswer.of(task, timeout_s) from None

    def restart(self, role: str) -> VirtualTask:
        return VirtualTask(role=role, method="restart", work=self.loop.create_task(self._restart(role)))

    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    async def _restart(self, role: str) -> None:
        self.roles[role].restart()

    async def _answer_at(self, when: float, answer: Any, error: Exception | None) -> Any:
        if inspect.isawaitable(answer):
            return await answer
        await self.loop.sleep_until(when)
        if error is not None:
            raise error
        return answer
