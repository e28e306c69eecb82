"""The roles that add fields to a rollout's groups: which there are, their calls, and how a dead one is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from buffer_rl.driver.tasks import Runtime, Task
from buffer_rl.errors import BufferRLError, WorkerDiedError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """Who computes what of each rollout.

    own: roles with processes of their own, each the name of its reading task. trainer_models: whose
    log-probabilities the trainer computes: ``ref``, ``actor``. given: fields that ``own`` roles add.
    stream_gradients: the trainer goes on to forward and backward while the rollout still runs.
    max_restarts: how often, over the whole run, a role's dead processes are replaced.
    """

    own: tuple[str, ...] = ()
    trainer_models: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    stream_gradients: bool = False
    max_restarts: int = 0


class RoleNotices(Protocol):
    """Hears what the user should know of roles."""

    def notice(self, text: str) -> None:
        """Something happened that does not end the run."""
        ...


@dataclass(slots=True)
class RoleCalls:
    """The calls on roles that are under way, by rollout."""

    _plan: RolePlan
    _runtime: Runtime
    _notices: RoleNotices
    _calls: dict[int, dict[str, Task]] = field(default_factory=dict)
    _restarts: int = 0

    def start(self, rollout_id: int, *, trainer_too: bool) -> None:
        """Have the roles work on a rollout; the trainer too, if it is to work while the rollout runs."""
        calls = {role: self._runtime.submit(role, "stream", rollout_id) for role in self._plan.own}
        plan = self._plan
        if trainer_too and (plan.trainer_models or plan.stream_gradients):
            duties = (list(plan.trainer_models), list(plan.given), plan.stream_gradients)
            calls["train"] = self._runtime.submit("train", "stream", rollout_id, *duties)
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

    def forget(self) -> list[Task]:
        """Give up all calls under way. Returns what to wait for: the calls, and one behind them on each role, whose
        processes may not end together."""
        ended = [*self.all_tasks(), *(self._runtime.submit(role, "ready") for role in self._plan.own)]
        self._calls.clear()
        return ended

    def replace(self, ended: Task, error: BufferRLError, buffer: Callable[..., Any]) -> Task:
        """Replace the role whose process died in the call ``ended``, and have it do again what was lost.

        Returns the new call. Raises ``error`` if the call is none of a replaceable role, if it failed otherwise than
        by a death, or if there were too many restarts."""
        place = self._place(ended)
        if place is None or not isinstance(error, WorkerDiedError) or self._restarts >= self._plan.max_restarts:
            raise error
        role = ended.role
        self._restarts += 1
        self._notices.notice(
            f"{role} died and is replaced ({self._restarts} of {self._plan.max_restarts}): {error.what}"
        )
        # Out of sight first: who waits for the Buffer below looks at every call, and would find these dead again.
        lost = [rollout_id for rollout_id, calls in self._calls.items() if calls.pop(role, None) is not None]
        self._runtime.restart(role)
        for rollout_id in lost:
            buffer("requeue_for_readers", f"train_{rollout_id}", role)
            self._calls[rollout_id][role] = self._runtime.submit(role, "stream", rollout_id)
        return self._calls[place][role]

    def _place(self, task: Task) -> int | None:
        if task.role not in self._plan.own:
            return None
        return next((r for r, calls in self._calls.items() if calls.get(task.role) is task), None)
