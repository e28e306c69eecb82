"""What the driver asks of what executes its calls, and of what shows them.

A runtime with processes and one with virtual time both fit, so that a schedule can be tested without processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from buffer_rl.observe.timeline import WorkSpan


class Task(Protocol):
    """One call under way."""

    @property
    def role(self) -> str: ...
    @property
    def method(self) -> str: ...


class Runtime(Protocol):
    """Executes calls on named roles: ``buffer``, ``rollout``, ``train``, ``publish``, ``save``, ``record``, and the
    roles of ``RolePlan.own``."""

    def submit(self, role: str, method: str, *args: Any) -> Task:
        """Start a call and return at once."""
        ...

    def wait_any(self, tasks: Sequence[Task], timeout_s: float) -> Task:
        """The first of ``tasks`` to end. Raises DeadlineError, naming role and method, after ``timeout_s``."""
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


class Observer(Protocol):
    """Sees what happens. What it raises ends the run."""

    def phase(self, name: str) -> None:
        """The driver entered a phase: generate, train, save, publish, evaluate."""
        ...

    def rollout_ended(
        self, rollout_id: int, evaluation: bool, metrics: Mapping[str, float], samples: list[dict[str, Any]]
    ) -> None:
        """A rollout, or the evaluation of version ``rollout_id``, is done; some of its samples to show."""
        ...

    def trained(self, rollout_id: int, step: int, metrics: Mapping[str, float]) -> None:
        """The optimizer took step ``step`` and the Buffer committed the rollout."""
        ...

    def published(self, version: int, metrics: Mapping[str, float]) -> None:
        """Every engine has ``version``."""
        ...

    def worked(self, role: str, spans: Sequence[WorkSpan]) -> None:
        """What a role did, and when."""
        ...

    def notice(self, text: str) -> None:
        """Something happened that does not end the run."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rollout ``step`` was trained on and published: all metrics of the step."""
        ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The weights of version ``step`` were evaluated."""
        ...
