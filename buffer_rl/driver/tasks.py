"""The driver's calls: what executes them, those on the roles that add fields to rollouts, and their times.

A runtime with processes and one with virtual time both fit, so that a schedule can be tested without processes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from buffer_rl.errors import BufferRLError, WorkerDiedError
from buffer_rl.observe.timeline import WorkSpan
from buffer_rl.plan.schedule import RolePlan

if TYPE_CHECKING:
    from buffer_rl.observe.observer import RunObserver


class Task(Protocol):
    """One call under way."""

    @property
    def role(self) -> str: ...
    @property
    def method(self) -> str: ...


class Runtime(Protocol):
    """Executes calls on named roles: ``buffer``, ``rollout``, ``train``, ``publish``, ``save``, ``record``, and the
    roles of ``RolePlan.dedicated_roles``."""

    def submit(self, role: str, method: str, *args: Any) -> Task:
        """Start a call and return at once."""
        ...

    def wait_any(self, tasks: Sequence[Task], timeout_s: float, *, watches: bool = True) -> Task:
        """The first of ``tasks`` to end. Raises DeadlineError, naming role and method, after ``timeout_s``. watches:
        whether what is watched beside calls ends the wait too, with its error."""
        ...

    def result(self, task: Task) -> Any:
        """A finished task's answer; raises the error of ``buffer_rl.errors`` that it ended with."""
        ...

    def restart(self, role: str) -> None:
        """Replace the processes of a role, which died. Raises WorkerError if the role cannot be restarted."""
        ...

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...


def role_of(error: BufferRLError) -> str:
    """The role whose process an error is about; empty if it does not say it."""
    found = re.match(r"\w+", error.where)
    return found[0] if found else ""


def is_worker_death(role: str, error: BufferRLError) -> bool:
    """Whether a process of ``role`` died, and not another one that it was calling."""
    return isinstance(error, WorkerDiedError) and role_of(error) == role


class StepTimes:
    """Where the time of a step goes, by the clock of ``runtime``."""

    def __init__(self, runtime: Runtime, observer: RunObserver) -> None:
        self._runtime = runtime
        self._observer = observer
        self._started = runtime.now()
        self._seconds: dict[str, float] = {}
        self._buffer_seconds: dict[str, float] = {}

    def begin(self) -> None:
        """A step begins."""
        self._started = self._runtime.now()
        self._seconds.clear()

    def metrics(self, generated_tokens: float | None) -> dict[str, float]:
        """``perf/{name}_time`` in seconds, and ``perf/tokens_per_s``: generated tokens per second of
        ``perf/rollout_time``."""
        metrics = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
        metrics["perf/step_time"] = self._runtime.now() - self._started
        if self._seconds["rollout"] > 0 and generated_tokens is not None:
            metrics["perf/tokens_per_s"] = generated_tokens / self._seconds["rollout"]
        return metrics

    @contextmanager
    def of(self, name: str, role: str | None = None, rollout_id: int = 0) -> Iterator[None]:
        """Count the block's seconds as ``perf/{name}_time``; on the timeline of ``role``, where one is given."""
        started = self._runtime.now()
        try:
            yield
        finally:
            ended = self._runtime.now()
            self._seconds[name] = self._seconds.get(name, 0.0) + ended - started
            if role is not None:
                self._observer.worked(role, [WorkSpan(name=name, rollout_id=rollout_id, start=started, end=ended)])

    def of_buffer(self, progress: Mapping[str, Any]) -> dict[str, float]:
        """Seconds since the last call of this in which the Buffer changed its state, and of those in the ledger.
        progress: the Buffer's counts of now."""
        times = {}
        for key, name in (("work_s", "perf/buffer_time"), ("ledger_s", "perf/ledger_time")):
            if key in progress:
                before = self._buffer_seconds.get(key, 0.0)
                self._buffer_seconds[key] = now = progress[key]
                times[name] = now - before if now >= before else now  # a Buffer that was replaced counts from 0
        return times


@dataclass(slots=True)
class RoleCalls:
    """The calls on roles that are under way, by rollout."""

    _plan: RolePlan
    _runtime: Runtime
    _observer: RunObserver
    _calls: dict[int, dict[str, Task]] = field(default_factory=dict)
    _restarts: Counter[str] = field(default_factory=Counter)

    def start(self, rollout_id: int, *, trainer_too: bool) -> None:
        """Have the roles work on a rollout; trained ones too, if they are to work while the rollout runs."""
        calls = {role: self._runtime.submit(role, "stream", rollout_id) for role in self._plan.dedicated_roles}
        plan = self._plan
        for role in plan.trained if trainer_too else ():
            models = plan.models_of(role)
            if models or plan.stream_gradients:
                work = (models, plan.awaited_by(role), plan.stream_gradients)
                calls[role] = self._runtime.submit(role, "stream", rollout_id, *work)
        self._calls[rollout_id] = calls

    def tasks(self, rollout_id: int) -> Iterator[tuple[str, Task]]:
        """The roles and their calls on a rollout, one after another as they are waited for; then they are forgotten."""
        calls = self._calls.get(rollout_id, {})
        while calls:
            role = next(iter(calls))
            yield role, calls[role]
            del calls[role]
        self._calls.pop(rollout_id, None)

    def all_tasks(self) -> list[Task]:
        """Every call under way."""
        return [task for calls in self._calls.values() for task in calls.values()]

    def rollout_of(self, task: Task) -> int | None:
        """The rollout that a call under way works on; None for any other task."""
        return next((r for r, calls in self._calls.items() if task in calls.values()), None)

    def forget(self, rollouts: Iterable[int]) -> list[Task]:
        """Forget the calls on rollouts. Returns the tasks to wait for: the calls, and one behind them on each role,
        whose processes may not end together."""
        calls = [task for rollout_id in rollouts for task in self._calls.pop(rollout_id, {}).values()]
        return [*calls, *(self._runtime.submit(role, "ready") for role in self._plan.dedicated_roles)]

    def restart(self, role: str, error: BufferRLError) -> None:
        """Replace the processes of a role that died with ``error``; raises it if they are not replaced in place, or
        were replaced too often."""
        self._require_restart(role, error)
        self._restarts[role] += 1
        count, limit = self._restarts[role], self._plan.max_restarts
        self._observer.notice(f"{role} died and is replaced ({count} of {limit}): {error.what}")
        self._runtime.restart(role)

    def _require_restart(self, role: str, error: BufferRLError) -> None:
        if role in self._plan.restarted_globally:
            raise error
        if (count := self._restarts[role]) >= self._plan.max_restarts:
            used = f"{count} of {self._plan.max_restarts} were used for {role}"
            error.hint = error.hint or f"--role-max-restarts: {used}"
            raise error

    def replace(self, ended: Task, error: BufferRLError, requeue: Callable[[str, str], object]) -> Task:
        """Replace the role whose process died in the call ``ended``, and have it do again what was lost.

        requeue: makes the rows of a task ready again for a role, both by name.
        Returns the new call. Raises ``error`` if the call is none of a replaceable role, if it failed otherwise than
        by a death, or if there were too many restarts."""
        place = self.rollout_of(ended) if ended.role in self._plan.dedicated_roles else None
        if place is None or not is_worker_death(ended.role, error):
            raise error
        role = ended.role
        self._require_restart(role, error)
        # Removed first: the wait for the Buffer below looks at every call, and would find these dead again.
        lost = [rollout_id for rollout_id, calls in self._calls.items() if calls.pop(role, None) is not None]
        self.restart(role, error)
        for rollout_id in lost:
            requeue(f"train_{rollout_id}", role)
            self._calls[rollout_id][role] = self._runtime.submit(role, "stream", rollout_id)
        return self._calls[place][role]
