"""The driver's calls: what executes them, the replacement of processes that died, and the times of a step.

A runtime with processes and one with virtual time both fit, so that a schedule can be tested without processes."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from buffer_rl.cluster.dispatch import Method, Ts
from buffer_rl.errors import BufferRLError, DeadlineError, WorkerDiedError, WorkerHungError
from buffer_rl.observe.memory import peak_metrics
from buffer_rl.observe.timeline import WorkSpan
from buffer_rl.plan.schedule import RolePlan, RunPlan

if TYPE_CHECKING:
    from buffer_rl.observe.observer import RunObserver

R = TypeVar("R")


class Task(Protocol):
    """One call under way."""

    @property
    def role(self) -> str: ...
    @property
    def method(self) -> str: ...


class Runtime(Protocol):
    """Executes calls on named roles: ``buffer``, ``selection``, ``rollout``, ``train``, ``publish``, ``save``,
    ``record``, and the roles of ``RolePlan.dedicated_roles``."""

    def run(self, main: Callable[[], Coroutine[Any, Any, R]], look: Callable[[BaseException | None], None]) -> R:
        """Run a coroutine on an event loop of its own, to its end. look: called in the loop about once a second, with
        the error of what is watched beside calls if there is one."""
        ...

    def submit(self, role: str, method: Method[*Ts], *args: *Ts) -> Task:
        """Start a call and return at once. method: of the class that has the role's calls, such as
        ``TrainRank.fetch``."""
        ...

    async def answer(self, task: Task, timeout_s: float) -> Any:
        """The task's answer. Raises the error of ``buffer_rl.errors`` that it ended with; NoAnswer after ``timeout_s``.
        Neither that nor a cancellation ends the call."""
        ...

    def restart(self, role: str) -> Task:
        """Start to replace the processes of a role, which died. The task raises WorkerError if it cannot be done."""
        ...

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...


class NoAnswer(DeadlineError):
    """A call did not answer in time, and is under way still."""

    @classmethod
    def of(cls, task: Task, timeout_s: float) -> NoAnswer:
        """Of a call."""
        return cls(f"no answer within {timeout_s:g} s", where=f"{task.role}.{task.method}")


def role_of(error: BufferRLError) -> str:
    """The role whose process an error is about; empty if it does not say it."""
    found = re.match(r"\w+", error.where)
    return found[0] if found else ""


def is_worker_death(role: str, error: BufferRLError) -> bool:
    """Whether a process of ``role`` died, and not another one that it was calling."""
    return isinstance(error, WorkerDiedError) and role_of(error) == role


def run_to_end(loop: asyncio.AbstractEventLoop, main: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """Run ``main`` on ``loop``, and close it. If it raises, or a signal's handler does, what is under way is cancelled
    first."""
    try:
        return loop.run_until_complete(main())
    finally:
        try:
            if left := asyncio.all_tasks(loop):
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left))
        finally:
            loop.close()


async def unbroken(work: Coroutine[Any, Any, R]) -> R:
    """Await ``work`` to its end, also if the caller is cancelled meanwhile, which it then is afterwards."""
    inner = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not inner.done():
        try:
            await asyncio.shield(inner)
        except asyncio.CancelledError as error:
            cancelled = error
        except BufferRLError:
            break
    if cancelled is not None:
        if not inner.cancelled():
            inner.exception()  # asked for, or asyncio would report it as one that nothing waited for
        raise cancelled
    return inner.result()


async def all_of(works: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Await all ``works``, which run side by side, to their ends. Raises the first error that comes, once the others
    are cancelled and have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Calls:
    """Calls on roles by the coroutines of one run, and the conditions that they wait for."""

    def __init__(self, plan: RunPlan, runtime: Runtime) -> None:
        self.runtime = runtime
        self.changed = asyncio.Event()
        self._plan = plan
        self._group: asyncio.TaskGroup | None = None

    def begin(self, group: asyncio.TaskGroup) -> None:
        """The coroutines of the run are those of ``group``, which ends with the first one that fails."""
        self._group = group

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """A coroutine beside the caller. Whatever waits for a condition looks again when it has ended."""
        assert self._group is not None, "the run has begun"
        task = self._group.create_task(work)
        task.add_done_callback(lambda _: self.tell())
        return task

    def tell(self) -> None:
        """Something changed that a coroutine may wait for."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds."""
        while not condition():
            await self.changed.wait()

    async def call(self, role: str, method: Method[*Ts], *args: *Ts, timeout_s: float) -> Any:
        """The answer of a role. Raises what ``Runtime.answer`` raises."""
        return await self.runtime.answer(self.runtime.submit(role, method, *args), timeout_s)

    async def buffer(self, operation: Callable[[Any, *Ts], R], *args: *Ts) -> R:
        """The answer of an operation of the Buffer, which comes soon."""
        return cast("R", await self.call("buffer", operation, *args, timeout_s=self._plan.buffer_timeout_s))

    async def on_trained(self, method: Method[*Ts], *args: *Ts, roles: Sequence[str] | None = None) -> list[Any]:
        """The answers of trained roles, of all where none are named, which work at the same time."""
        chosen = self._plan.roles.trained if roles is None else roles
        calls = [self.runtime.submit(role, method, *args) for role in chosen]
        return await asyncio.gather(*(self.runtime.answer(call, self._plan.train_timeout_s) for call in calls))


class StepTimes:
    """Where the time of a step goes, by the clock of ``runtime``."""

    def __init__(self, runtime: Runtime, observer: RunObserver) -> None:
        self._runtime = runtime
        self._observer = observer
        self._started = runtime.now()
        self._seconds: dict[str, float] = {}
        self._buffer_seconds: dict[str, float] = {}
        self._open: dict[object, tuple[str, WorkSpan]] = {}  # role and beginning of what is under way

    def begin(self) -> None:
        """A step begins."""
        self._started = self._runtime.now()
        self._seconds.clear()

    def metrics(self, generated_tokens: float | None) -> dict[str, float]:
        """``perf/{name}_time`` in seconds, and ``perf/tokens_per_s``: generated tokens per second of
        ``perf/rollout_time``, if they are of the step alone and not None."""
        metrics = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
        metrics["perf/step_time"] = self._runtime.now() - self._started
        if self._seconds.get("rollout", 0.0) > 0 and generated_tokens is not None:
            metrics["perf/tokens_per_s"] = generated_tokens / self._seconds["rollout"]
        return metrics

    @contextmanager
    def of(self, name: str, role: str | None = None, rollout_id: int = 0) -> Iterator[None]:
        """Count the block's seconds as ``perf/{name}_time``; on the timeline of ``role``, where one is given."""
        started = self._runtime.now()
        try:
            with nullcontext() if role is None else self.shown(role, name, rollout_id):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._runtime.now() - started

    @contextmanager
    def shown(self, role: str, name: str, rollout_id: int) -> Iterator[None]:
        """Show the block on the timeline of ``role``; steps that end meanwhile know it as ``under_way``."""
        started, key = self._runtime.now(), object()
        self._open[key] = role, WorkSpan(name=name, rollout_id=rollout_id, start=started, end=started)
        try:
            yield
        finally:
            _, span = self._open.pop(key)
            self._observer.worked(role, [replace(span, end=self._runtime.now())])

    def under_way(self) -> dict[str, list[WorkSpan]]:
        """What has begun and not ended, by role, until now."""
        spans: dict[str, list[WorkSpan]] = {}
        for role, span in self._open.values():
            spans.setdefault(role, []).append(replace(span, end=self._runtime.now()))
        return spans

    def of_buffer(self, progress: Mapping[str, Any]) -> dict[str, float]:
        """Seconds since the last call in which the Buffer changed its state, and of those in the ledger; and the peak
        memory of its process. progress: the Buffer's counts of now."""
        times = peak_metrics("buffer", [progress.get("peak", {})])
        for key, name in (("work_s", "perf/buffer_time"), ("ledger_s", "perf/ledger_time")):
            if key in progress:
                before = self._buffer_seconds.get(key, 0.0)
                self._buffer_seconds[key] = now = progress[key]
                times[name] = now - before if now >= before else now  # a Buffer that was replaced counts from 0
        return times


@dataclass(slots=True)
class Restarts:
    """Replaces the processes of roles that died: each death once, however many calls ended with it. timeout_s: for one
    replacement."""

    _plan: RolePlan
    _runtime: Runtime
    _observer: RunObserver
    _timeout_s: float
    _counts: Counter[str] = field(default_factory=Counter)
    _replacing: dict[str, asyncio.Future[Any]] = field(default_factory=dict)

    def count(self, role: str) -> int:
        """How often the role was replaced: to be noted when a call on it is made."""
        return self._counts[role]

    async def replace(self, role: str, seen: int, error: BufferRLError) -> None:
        """Replace the processes of a role, which died with ``error`` in a call that was made at the count ``seen``.

        Raises ``error`` if they are not replaced in place, or were replaced too often."""
        if role in self._plan.restarted_globally:
            raise error
        if self._counts[role] == seen:
            if seen >= self._plan.max_restarts:
                error.hint = error.hint or f"--role-max-restarts: {seen} of {seen} were used for {role}"
                raise error
            self._counts[role] += 1
            how = "hung" if isinstance(error, WorkerHungError) else "died"
            count = f"{seen + 1} of {self._plan.max_restarts}"
            self._observer.notice(f"{role} {how} and is replaced ({count}): {error.what}")
            restarted = self._runtime.answer(self._runtime.restart(role), self._timeout_s)
            self._replacing[role] = asyncio.ensure_future(restarted)
        await asyncio.shield(self._replacing[role])
