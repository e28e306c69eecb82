"""One rank's optimizer steps on a rollout: one for each mini-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from buffer_rl.contracts import Trainer
from buffer_rl.errors import TrainError
from buffer_rl.train.estimator import is_supervised
from buffer_rl.train.non_finite import NonFiniteGuard
from buffer_rl.types import TrainBatch


def train_steps(trainer: Trainer, batches: Sequence[TrainBatch], guard: NonFiniteGuard) -> dict[str, float]:
    """Advantages, forward and backward, and one optimizer step on each of ``batches``, one after another.

    Each batch is a rank's share of a mini-batch and carries that mini-batch's totals, so that its loss is a mean over
    its own step. Returns means over the steps: ``sum/NAME`` of the metrics that add up over ranks, the
    others as they are; ``lr`` is that of the last step. Steps that ``guard`` leaves out are left out of the means.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    same: dict[str, float] = {}
    num_taken = 0
    for part, batch in enumerate(batches):
        if "advantages" not in batch.columns:  # a role of its own, or the user's converter, may have set them
            trainer.compute_advantages(batch)
        shares = trainer.forward_backward(batch)
        taken = guard.step(trainer.optimizer_step, lambda batch=batch: batch, part=part)  # type: ignore[misc]
        if taken is None:
            continue
        num_taken += 1
        same = taken
        for name, value in {**{f"sum/{name}": share for name, share in shares.items()}, **same}.items():
            totals[name] += value
    means = {name: total / num_taken for name, total in totals.items()}
    return means | {name: value for name, value in same.items() if name == "lr"} | guard.metrics()


def require_old_log_probs(args: Any, batches: Sequence[TrainBatch]) -> None:
    """Raises TrainError where several steps would take each one's own weights for those that sampled its rows: from the
    second step on, the ratio of new to old probability would be 1, and nothing would be clipped."""
    if len(batches) == 1 or is_supervised(args) or args.use_rollout_logprobs:
        return
    for step, batch in enumerate(batches):
        if "old_log_probs" not in batch.columns:
            raise TrainError(
                f"mini-batch {step} of {len(batches)} has no old log-probabilities",
                where=batch.task,
                expected="a column old_log_probs: several steps need them from before the first",
                hint="call log_probs('actor') before train()",
            )
