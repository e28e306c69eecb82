"""A role with processes of its own that adds fields to the rows of running rollouts: the reference model, the
teacher, the actor's forward pass, the advantages.

Who waits for whom: a worker waits for rows that are ready (a deadline each) and for nothing else; the driver waits for
all workers of a role when the step needs their fields. A worker holds no state that cannot be computed again: one that
died is replaced, and rows that it read and did not write are delivered again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import ray

from buffer_rl.buffer.client import BufferClient
from buffer_rl.cluster.placement import Placement
from buffer_rl.cluster.worker_group import WorkerGroup, redirect_output
from buffer_rl.config import load_args
from buffer_rl.errors import TrainError, WorkerDiedError
from buffer_rl.observe.timeline import WorkReport
from buffer_rl.plugins import PluginRegistry
from buffer_rl.roles import MODEL_OF_ROLE, worker_counts
from buffer_rl.train.forward import batch_outputs
from buffer_rl.train.model import ModelFactory, initial_folder, pick_device, prepare_torch
from buffer_rl.train.objective import Objective
from buffer_rl.train.stream import Stage, advantage_stage, log_prob_stage, longest_wait, rows_per_batch, run_stage

if TYPE_CHECKING:
    from buffer_rl.options import Args


class RoleWorker:
    """One process of a role of ``buffer_rl.roles.DEDICATED``."""

    def __init__(self, args_text: str, buffer: Any, role: str, index: int, num_workers: int, log_path: str) -> None:
        redirect_output(log_path)
        self._index = index
        self._num_workers = num_workers
        self._args = cast("Args", load_args(args_text))
        self._role = role
        self._buffer = BufferClient(buffer, timeout_s=self._args.buffer_timeout_s, caller=f"{role}-{index}")
        self._registry = PluginRegistry.from_flags(self._args.plugin)
        self._model: Any = None
        prepare_torch(self._args, self._args.seed)
        if role in MODEL_OF_ROLE:
            self._load(*initial_folder(self._args, role))
        self._version = "0"
        self._stage = self._make_stage()

    def ready(self) -> None:
        """Answers once the model is loaded."""

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Take the weights in the folder ``path``; for ``actor_fwd`` and, where it is updated, ``ref``."""
        self._load(path, "update_weights_from_disk")
        self._version = str(version)

    def version(self) -> str:
        """The weight version that it computes with."""
        return self._version

    def stream(self, rollout_id: int) -> WorkReport:
        """Work on rollout ``rollout_id`` until it is closed and read to its end.

        Raises TrainError if the weights are not of the version that trains on the rollout, which old log-probabilities
        are of."""
        if self._role == "actor_fwd" and self._version != str(rollout_id):
            raise TrainError(f"the weights are version {self._version}", where="actor_fwd", expected=str(rollout_id))
        return run_stage(
            self._stage,
            self._buffer,
            rollout_id,
            rows_per_batch=rows_per_batch(self._args, self._num_workers),
            replica=self._index,
            num_replicas=self._num_workers,
            timeout_s=longest_wait(self._args),
        )

    def _load(self, path: str | None, flag: str) -> None:
        self._device = pick_device(self._args.train_device)
        self._model = ModelFactory(self._args, self._registry, self._device).build(path, flag).requires_grad_(False)

    def _make_stage(self) -> Stage:
        args = self._args
        objective = Objective(args, self._registry)
        if self._role == "advantages":
            return advantage_stage(objective)
        return log_prob_stage(
            self._role,
            [MODEL_OF_ROLE[self._role]],
            lambda _, batch: batch_outputs(args, self._model, batch, self._device, objective),
        )


class RoleGroup(WorkerGroup):
    """The processes of one role, which a restart replaces.

    start_members: starts the actors, at first and for each restart.
    """

    def __init__(self, role: str, start_members: Callable[[], Sequence[Any]], ready_timeout_s: float) -> None:
        super().__init__(role, start_members(), combine=_combine)
        self._start_members = start_members
        self._ready_timeout_s = ready_timeout_s
        self._weights: tuple[str, int] | None = None

    def wait_ready(self) -> None:
        """Wait until every worker has its model. Raises DeadlineError or WorkerError."""
        self.call("ready", timeout_s=self._ready_timeout_s)

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Load the version into every worker, and into those that replace them later.

        A dead worker is not replaced here: the role's next call fails with WorkerDiedError, and replaces the role."""
        self._weights = (path, version)
        with contextlib.suppress(WorkerDiedError):
            self._send_weights()

    def versions(self) -> dict[str, str]:
        """The weight version of the role."""
        return {self.role: str(self.call("version", timeout_s=self._ready_timeout_s))}

    def restart(self) -> None:
        """End all workers and start others, with the weights of the ended ones."""
        self.stop()
        self.actors = list(self._start_members())
        self.wait_ready()
        if self._weights is not None:
            self._send_weights()

    def _send_weights(self) -> None:
        self.call("update_weights_from_disk", *(self._weights or ()), timeout_s=self._ready_timeout_s)


def _combine(method: str, answers: list[Any]) -> Any:
    return WorkReport.joined(answers) if method == "stream" else answers[0]


def start_role(
    role: str, num_workers: int, args: Any, args_text: str, buffer: Any, log_dir: str, placement: Placement
) -> RoleGroup:
    """Start the processes of a role; they have their models when ``wait_ready`` has returned."""
    remote = cast(Any, ray.remote)(max_restarts=0)(RoleWorker)

    def start_members() -> Sequence[Any]:
        return [
            remote.options(**placement.options(role, index)).remote(
                args_text, buffer, role, index, num_workers, f"{log_dir}/{role}_{index}.log"
            )
            for index in range(num_workers)
        ]

    return RoleGroup(role, start_members, args.train_timeout_s)


def start_roles(
    args: Any, roles: Sequence[str], args_text: str, buffer: Any, log_dir: str, placement: Placement
) -> dict[str, RoleGroup]:
    """Start the roles with processes of their own."""
    counts = worker_counts(args)
    return {role: start_role(role, counts[role], args, args_text, buffer, log_dir, placement) for role in roles}
