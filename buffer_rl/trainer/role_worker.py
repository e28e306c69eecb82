"""A role with processes of its own that adds fields to the rows of running rollouts: the reference model, the
teacher, the actor's forward pass, the advantages.

Who waits for whom: a worker waits for rows that are ready (a deadline each) and for nothing else; the driver waits for
all workers of a role when the step needs their fields. A worker holds no state that cannot be computed again: one that
died is replaced, and rows that it read and did not write are delivered again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from buffer_rl.args import Args
from buffer_rl.buffer.client import BufferClient
from buffer_rl.cluster.actor_group import ActorGroup, FusedProcesses, redirect_output
from buffer_rl.cluster.dispatch import dispatch
from buffer_rl.cluster.placement import Placement
from buffer_rl.cluster.process import settle_garbage_collector
from buffer_rl.errors import TrainError
from buffer_rl.observe.timeline import WorkReport
from buffer_rl.options.section import load_args
from buffer_rl.plan.algorithm import fused_roles, own_roles, process_counts
from buffer_rl.plan.roles import MODEL_OF_ROLE, Role
from buffer_rl.plugin.calls import call, construct, returned
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Column, TrainBatch
from buffer_rl.trainer.stream import Stage, advantage_stage, log_prob_stage, reading
from buffer_rl.weights.role_weights import BroadcastMember


def joined_reports(role: str, answers: list[WorkReport]) -> WorkReport:
    """What all members of a role have worked on."""
    return WorkReport.joined(answers)


def own_stage(reference: str, row: Role, args: Args, registry: PluginRegistry) -> Stage:
    """What a role of ``--role-path`` does. Raises PluginError if its class cannot be constructed; so does a write of
    other fields than those of its row, or of other rows than those of the batch.

    One with ``work`` is final: its numbers may depend on all groups that it read, so none of them leaves the step, and
    a process that replaces another reads all of them again."""
    role = construct("role", reference, registry.resolve("role", reference), args)

    def check(batch: TrainBatch, columns: Mapping[str, Column]) -> None:
        if not isinstance(columns, Mapping) or set(columns) != set(row.fields):
            raise returned("role", reference, columns, f"a mapping with the fields {', '.join(row.fields)}")
        for name, column in columns.items():
            if not _has_rows_of(batch, column):
                expected = f"{name}: for {len(batch)} rows, a list of [response_length] arrays or an array [num_rows]"
                raise returned("role", reference, column, expected)

    work = partial(call, "role", reference, role.work, at="work") if hasattr(role, "work") else None
    return Stage(reading(row.name, row.needs, row.fields, is_final=work is not None), role.compute, work, check)


def _has_rows_of(batch: TrainBatch, column: Any) -> bool:
    if isinstance(column, list) and any(map(np.ndim, column)):
        return [np.shape(row)[:1] for row in column] == [(length,) for length in batch.columns["response_length"]]
    return bool(np.shape(column)[:1] == (len(batch),))


class RoleWorker(BroadcastMember):
    """One process of a role of ``buffer_rl.plan.roles.DEDICATED``, or of ``--role-path``."""

    def __init__(self, args_text: str, buffer: Any, role: str, index: int, num_workers: int, log_path: str) -> None:
        settle_garbage_collector()
        from buffer_rl.trainer.pretrained import prepare_torch  # in the role's process alone: it has torch
        from buffer_rl.trainer.role_model import RoleModel

        redirect_output(log_path)
        self._args = load_args(args_text)
        self._role = role
        self._buffer = BufferClient(buffer, timeout_s=self._args.buffer_timeout_s, caller=f"{role}-{index}")
        self._registry = PluginRegistry.from_flags(self._args.plugin)
        prepare_torch(self._args, self._args.seed)
        self._model: Any = RoleModel(self._args, self._registry, role, index) if role in MODEL_OF_ROLE else None
        self._stage = self._make_stage()
        self._dataset = self._stage.dataset(self._buffer, self._args, index, num_workers)
        settle_garbage_collector()

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Take the weights in the folder ``path``; for ``actor_fwd`` and, where it is updated, ``ref``."""
        self._model.load(path, "update_weights_from_disk", str(version))

    def version(self) -> str:
        """The weight version that it computes with."""
        return str(self._model.version)

    @dispatch(collect=joined_reports)
    def stream(self, rollout_id: int) -> WorkReport:
        """Work on rollout ``rollout_id`` until it is closed and read to its end.

        Raises TrainError if the weights are not of the version that trains on the rollout, which old log-probabilities
        are of."""
        if self._role == "actor_fwd" and self.version() != str(rollout_id):
            raise TrainError(f"the weights are version {self.version()!r}", where="actor_fwd", expected=str(rollout_id))
        report = self._stage.run(self._dataset, rollout_id)
        gc.collect()
        return report

    def _make_stage(self) -> Stage:
        from buffer_rl.trainer.forward import batch_outputs
        from buffer_rl.trainer.objective import Objective
        from buffer_rl.trainer.routing_replay import RoutingReplay

        args = self._args
        own = own_roles(args, self._registry)
        if self._role in own:
            return own_stage(*own[self._role], args, self._registry)
        objective = Objective(args, self._registry)
        if self._role == "advantages":
            return advantage_stage(objective, [field for _, row in own.values() for field in row.fields])
        model = self._model
        replay = RoutingReplay.of(args, model.model.module) if self._role == "actor_fwd" else None
        return log_prob_stage(
            self._role,
            [MODEL_OF_ROLE[self._role]],
            lambda _, batch: batch_outputs(args, model.model.module, batch, model.device, objective, replay=replay),
        )


def start_roles(
    args: Args,
    registry: PluginRegistry,
    roles: Sequence[str],
    args_text: str,
    buffer: Any,
    log_dir: str,
    placement: Placement,
) -> dict[str, ActorGroup]:
    """Start the roles with processes of their own; they have their models when ``ready`` is answered. Those of
    ``--fuse-roles`` have the same processes."""
    if not roles:
        return {}
    counts = process_counts(args, own_roles(args, registry))

    def start(together: Sequence[str]) -> dict[str, ActorGroup]:
        label = "+".join(together)
        placed = next((role for role in together if placement.node_of(role, 0) is not None), together[0])

        def members(rank: int) -> dict[str, Callable[[], RoleWorker]]:
            log_path = f"{log_dir}/{label}_{rank}.log"
            return {
                role: partial(RoleWorker, args_text, buffer, role, rank, counts[role], log_path) for role in together
            }

        processes = FusedProcesses(members, partial(placement.options, placed))
        return {
            role: ActorGroup(role, partial(processes.start_member, role), counts[role], timeout_s=args.train_timeout_s)
            for role in together
        }

    groups = {role: group for names in fused_roles(args, counts) for role, group in start(names).items()}
    return {role: groups[role] for role in roles}
