"""What the driver asks of whatever executes its calls. A runtime with processes and one with virtual time
both fit, so that a schedule can be tested without processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


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
