"""What becomes of an optimizer step whose loss or gradient is not finite: it is left out, and its rows are kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from buffer_rl.buffer.row_file import write_rollout
from buffer_rl.errors import BufferRLError, NonFiniteError, TrainError
from buffer_rl.types import TrainBatch

FOLDER = "non_finite"


class NonFiniteGuard:
    """Counts such steps of one rank; every rank sees the same ones. A checkpoint does not keep the counts.

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
        """Where the rows are; or why they could not be written, which must not hide why they were to be."""
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
