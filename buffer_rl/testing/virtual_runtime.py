"""A runtime without processes: calls are made at once, and take as much virtual time as they are said to cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from buffer_rl.driver.tasks import Task
from buffer_rl.errors import DeadlineError

Cost = Callable[[str, str, tuple[Any, ...]], float]
"""Virtual seconds of a call: ``(role, method, args) -> seconds``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VirtualTask:
    """A call that ends at a moment of virtual time."""

    role: str
    method: str
    ends_at: float
    answer: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One call on the virtual time line."""

    role: str
    method: str
    args: tuple[Any, ...]
    start: float
    end: float


class VirtualRuntime:
    """A ``buffer_rl.driver.tasks.Runtime`` without processes. Calls to one role follow one another; roles overlap.

    roles: an object for each role, whose methods are called. ``spans`` lists every call in order of submission.
    """

    def __init__(self, roles: Mapping[str, Any], cost: Cost = lambda role, method, args: 0.0) -> None:
        self._roles = dict(roles)
        self._cost = cost
        self._now = 0.0
        self._free_at: dict[str, float] = {}
        self.spans: list[Span] = []

    def submit(self, role: str, method: str, *args: Any) -> VirtualTask:
        """Make the call; its effects are there at once, its answer when its time has passed."""
        start = max(self._now, self._free_at.get(role, 0.0))
        end = start + self._cost(role, method, args)
        self._free_at[role] = end
        self.spans.append(Span(role=role, method=method, args=args, start=start, end=end))
        try:
            answer = getattr(self._roles[role], method)(*args)
        except Exception as error:  # the boundary to the role: its error belongs to the task
            return VirtualTask(role=role, method=method, ends_at=end, error=error)
        return VirtualTask(role=role, method=method, ends_at=end, answer=answer)

    def wait_any(self, tasks: Sequence[Task], timeout_s: float, *, watches: bool = True) -> Task:
        """The task that ends first; virtual time moves on to its end."""
        first = min((cast(VirtualTask, task) for task in tasks), key=lambda task: task.ends_at)
        if first.ends_at > self._now + timeout_s:
            self._now += timeout_s
            raise DeadlineError(f"no answer within {timeout_s:g} s", where=f"{first.role}.{first.method}")
        self._now = max(self._now, first.ends_at)
        return first

    def result(self, task: Task) -> Any:
        """The task's answer, or its error raised."""
        mine = cast(VirtualTask, task)
        if mine.error is not None:
            raise mine.error
        return mine.answer

    def restart(self, role: str) -> None:
        """Restart the role's object."""
        self._roles[role].restart()

    def now(self) -> float:
        """Virtual seconds."""
        return self._now
