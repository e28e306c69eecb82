"""Which role computes which field of a rollout's rows, as stages (see ``buffer_rl.train.stages``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from buffer_rl.buffer.pool import DERIVED_FIELDS, FIELD_OF_MODEL
from buffer_rl.contracts import Trainer
from buffer_rl.train.stages import SAMPLED_FIELDS, Stage
from buffer_rl.types import Column, TrainBatch

ADVANTAGE_FIELDS = frozenset({"advantages", "returns"})
STREAMED_GROUPS = 4
"""Groups that a process works on at a time, at most and where that many are ready: larger passes are cheaper, but the
last one starts only when the one before has ended."""

ROLLOUT_GRACE_S = 120.0
"""A rollout ends within ``--rollout-timeout-s`` and twice the grace that a user's rollout function has (30 s)."""

LogProbs = Callable[[str, TrainBatch], list[np.ndarray]]
"""``(model, batch) -> rows`` with the model ``ref`` or ``actor``; see ``Trainer.log_probs``."""


class GradientTrainer(Trainer, Protocol):
    """A trainer that can start on a step before all its rows are known."""

    def accumulate(self, batch: TrainBatch) -> None: ...
    def finish_accumulation(self, total_samples: int, total_tokens: int) -> dict[str, float]: ...
    def zero_grad(self) -> None: ...


def longest_wait(args: Any) -> float:
    """Seconds that a role waits for a group: longer than any rollout may take, whose own error says more."""
    return float(args.rollout_timeout_s) + ROLLOUT_GRACE_S


def rows_per_batch(args: Any, num_readers: int) -> int:
    """Rows that each of a role's ``num_readers`` processes asks for at a time: no more groups than its part of a step,
    so that those that ask later find theirs; under ``--deterministic`` one group."""
    if args.deterministic:
        return 1
    part = math.ceil(int(args.rollout_batch_size) / num_readers)
    return min(part, STREAMED_GROUPS) * int(args.n_samples_per_prompt)


def log_prob_stage(name: str, models: Sequence[str], log_probs: LogProbs) -> Stage:
    """Log-probabilities under each of ``models``."""

    def compute(batch: TrainBatch) -> Mapping[str, Column]:
        return {FIELD_OF_MODEL[model]: log_probs(model, batch) for model in models}

    produces = frozenset(FIELD_OF_MODEL[model] for model in models)
    return Stage(name=name, needs=SAMPLED_FIELDS, produces=produces, compute=compute)


def advantage_stage(compute_advantages: Callable[[TrainBatch], None], given: frozenset[str] = frozenset()) -> Stage:
    """Advantages and returns of each group; ``compute_advantages`` sets them as columns, and needs one group alone.
    Advantages that came with the group, from the user's converter, are kept.

    given: fields that others add and the estimator needs, waited for. Of others it sees none, whatever is there by
    chance."""

    def compute(batch: TrainBatch) -> Mapping[str, Column]:
        if "advantages" in batch.columns:
            return {} if "returns" in batch.columns else {"returns": batch.columns["advantages"]}
        for name in DERIVED_FIELDS - given:
            batch.columns.pop(name, None)
        compute_advantages(batch)
        return {name: batch.columns[name] for name in sorted(ADVANTAGE_FIELDS)}

    return Stage(name="advantages", needs=SAMPLED_FIELDS | given, produces=ADVANTAGE_FIELDS, compute=compute)


def gradient_stage(trainer: GradientTrainer, models: Sequence[str], given: frozenset[str]) -> Stage:
    """Forward and backward of each group, after the fields that nobody else computes.

    models: whose log-probabilities the trainer computes itself. given: fields that other roles add, waited for."""

    def compute(batch: TrainBatch) -> Mapping[str, Column]:
        for model in models:
            batch.columns[FIELD_OF_MODEL[model]] = trainer.log_probs(model, batch)
        if "advantages" not in given and "advantages" not in batch.columns:  # the user's converter may give them
            trainer.compute_advantages(batch)
        trainer.accumulate(batch)
        return {}

    return Stage(name="train", needs=SAMPLED_FIELDS | given, produces=frozenset(), compute=compute, is_final=True)
