"""One rank's optimizer steps on a rollout: one for each mini-batch, without those that are not finite."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from buffer_rl.buffer.row_file import write_rollout
from buffer_rl.contracts import Trainer
from buffer_rl.errors import BufferRLError, NonFiniteError, TrainError
from buffer_rl.train.roles import is_supervised
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
    """Raises TrainError where rows of several steps have no old log-probabilities: from the second step on, the ratio
    of new to old probability would be taken to be 1, and nothing would be clipped."""
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


NON_FINITE_FOLDER = "non_finite"


class NonFiniteGuard:
    """Leaves out optimizer steps whose loss or gradient is not finite, keeps their rows, and counts them.

    Every rank sees the same ones. A checkpoint does not keep the counts.

    folder: where the rows go, each rank's share in a file that ``--load-debug-rollout-data`` reads. limit: so many in
    a row end the run. total: steps that were left out.
    """

    def __init__(self, folder: Path, rank: int, limit: int) -> None:
        self._folder = folder
        self._rank = rank
        self._limit = max(1, limit)
        self._in_a_row = 0
        self.total = 0

    def step(
        self, optimizer_step: Callable[[], dict[str, float]], rows: Callable[[], TrainBatch], *, part: int = 0
    ) -> dict[str, float] | None:
        """The metrics of ``optimizer_step()``; None where it is left out.

        rows: this rank's share of the step. part: number of the mini-batch in its rollout. Raises TrainError, after
        the rows were written, if there are too many such steps in a row."""
        try:
            metrics = optimizer_step()
        except NonFiniteError as error:
            self._in_a_row += 1
            self.total += 1
            file = self._dump(rows, part)
            print(f"{error}\nthe step is left out; its rows are in {file}", file=sys.stderr)
            if self._in_a_row >= self._limit:
                raise self._too_many(error, file) from error
            return None
        self._in_a_row = 0
        return metrics

    def metrics(self) -> dict[str, float]:
        """``non_finite_steps``, once there was one."""
        return {"non_finite_steps": float(self.total)} if self.total else {}

    def _dump(self, rows: Callable[[], TrainBatch], part: int) -> str:
        """The file with the rows; or why they could not be written, which must not hide the error of the step."""
        try:
            batch = rows()
            suffix = f"_part_{part}" if part else ""
            file = self._folder / f"step_{batch.rollout_id + 1}_rank_{self._rank}{suffix}.safetensors"
            write_rollout(file, batch)
        except (BufferRLError, OSError, ValueError, TypeError) as error:  # fault boundary: columns may be the user's
            return f"no file ({type(error).__name__}: {error})"
        return str(file)

    def _too_many(self, error: NonFiniteError, file: str) -> TrainError:
        count = "a step" if self._in_a_row == 1 else f"{self._in_a_row} steps in a row"
        return TrainError(
            f"{count} had a loss or a gradient that is not finite; of the last one, {error.what}",
            where=error.where,
            expected=f"fewer than --max-non-finite-steps {self._limit} in a row",
            hint=f"the rows of the last one are in {file}; {error.hint}",
        )
