"""Which advantage estimator a run has, and how a rollout's rows must reach it: without torch, for the driver's checks
too."""

from __future__ import annotations

from typing import Any, Protocol

from buffer_rl.buffer.readers import Splitting
from buffer_rl.plugins import PluginRegistry
from buffer_rl.scope import Scope, scope_of
from buffer_rl.types import TrainBatch

LOG_PROB_FIELDS = ("ref_log_probs", "old_log_probs")
"""Fields that others than the rollout compute and that an estimator may need (see ``buffer_rl.scope.scoped``)."""


class SharedRows(Protocol):
    """Where a rank's rows come from; ``buffer_rl.buffer.client.BufferClient`` is one."""

    def get_data(
        self, rollout_id: int, dp_rank: int, dp_size: int, num_steps: int, step: int, splitting: Splitting
    ) -> TrainBatch:
        """One rank's share of a mini-batch; see ``DataPool.share``."""
        ...


def is_supervised(args: Any) -> bool:
    """Whether the loss is the supervised one, which has neither advantages nor ratios."""
    return bool(args.loss_type == "sft_loss" and args.custom_loss_function_path is None)


def estimator_of(args: Any) -> tuple[str, str]:
    """The flag that names the run's advantage estimator, and the reference."""
    if args.custom_advantage_function_path:
        return "--custom-advantage-function-path", args.custom_advantage_function_path
    return "--advantage-estimator", args.advantage_estimator


def splitting(args: Any, registry: PluginRegistry) -> Splitting:
    """What the ranks may share a mini-batch by: whole groups where each rank's estimator must see a prompt's rows
    together. Under ``--deterministic`` whole groups too, where there are enough: a micro-batch then holds the same rows
    on any number of ranks. Raises PluginError if the estimator does not resolve."""
    ranks_estimate = not is_supervised(args) and not args.num_advantage_workers
    if ranks_estimate and scope_of(registry.resolve("advantage", estimator_of(args)[1])) is not Scope.ROW:
        return Splitting.GROUPS
    return Splitting.GROUPS_OR_ROWS if args.deterministic else Splitting.ROWS


def mini_batches(
    rows: SharedRows, rollout_id: int, rank: int, world_size: int, *, num_steps: int, splitting: Splitting
) -> list[TrainBatch]:
    """A rank's share of each of a rollout's mini-batches. Raises BufferStateError if one has too little for all ranks
    (see ``DataPool.share``)."""
    return [rows.get_data(rollout_id, rank, world_size, num_steps, step, splitting) for step in range(num_steps)]
