"""One rank's optimizer steps on a rollout: one for each mini-batch and pass, without those that are not finite.

And what a rollout's steps change in a run with ``--kl-target``: the KL coefficient, and its file in a checkpoint.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from buffer_rl.algo.kl import MEASURED_KL, adapted_coefficient
from buffer_rl.args import Args
from buffer_rl.errors import BufferRLError, CheckpointError, ConfigError, NonFiniteError, TrainError, raised_as
from buffer_rl.files.hf_config import read_config, text_config
from buffer_rl.files.row_file import write_rollout
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.kinds.trainer import Trainer
from buffer_rl.observe.terminal import say
from buffer_rl.plan.algorithm import adapted_option, is_supervised
from buffer_rl.plan.flops import RowCost, TrainWork
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.peers import summed_over_ranks

if TYPE_CHECKING:
    from buffer_rl.trainer.objective import Objective


@dataclass(slots=True, kw_only=True)
class StepReport:
    """One rank's account of its optimizer steps: its own sums of each that was taken, and metrics that are alike on
    every rank. non_finite: steps that the run has left out so far. kl_coef: that of the steps, if it is adapted;
    measured_kl: what is compared with ``--kl-target`` after them, of all ranks. work: what they computed, if the model
    is one whose FLOPs are known. peak: memory of the rank since its report before (see ``take_peaks``). sizes: unmasked
    response tokens and samples of its rows in each step that was taken, counted on the rows, apart from the divisors in
    ``sums``."""

    sums: list[Sums] = field(default_factory=list)
    sizes: list[tuple[float, float]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    non_finite: int = 0
    kl_coef: float | None = None
    measured_kl: float | None = None
    work: TrainWork | None = None
    peak: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def metrics_of(reports: Sequence[StepReport]) -> dict[str, float]:
        """All ranks' metrics, as means over the steps that were taken; ``lr`` is that of the last step, ``ref_kl`` the
        mean over the tokens of all of them. ``divisor`` is the sum of the steps' divisors, ``loss_tokens`` and
        ``loss_samples`` count the rows that they are of, over all ranks."""
        metrics = reports[0].metrics
        sums = [reduce(Sums.__add__, parts) for parts in zip(*(report.sums for report in reports), strict=True)]
        taken = [of_step.means() | same for of_step, same in zip(sums, metrics, strict=True)]
        found = {name: fmean(step[name] for step in taken if name in step) for step in taken for name in step}
        if taken:
            found["lr"] = metrics[-1]["lr"]
            found["divisor"] = sum(float(of_step.divisor) for of_step in sums)
        if sizes := [size for report in reports for size in report.sizes]:
            found["loss_tokens"], found["loss_samples"] = (sum(numbers) for numbers in zip(*sizes, strict=True))
        non_finite, kl_coef, kl = reports[0].non_finite, reports[0].kl_coef, reports[0].measured_kl
        rest = {"non_finite_steps": float(non_finite) or None, "kl_coef": kl_coef, MEASURED_KL: kl}
        return found | {name: value for name, value in rest.items() if value is not None}


def train_steps(
    trainer: Trainer, objective: Objective | None, batches: Sequence[TrainBatch], guard: NonFiniteGuard, passes: int = 1
) -> StepReport:
    """Forward and backward, and one optimizer step on each of ``batches``, one after another, each a rank's share of a
    mini-batch; all of it ``passes`` times. Advantages that no role, converter or earlier call has set are computed
    before a mini-batch's first step, and kept.

    objective: None on a rank that does not call it, whose rows may lack what it reads."""
    report = StepReport()
    for part, batch in enumerate([*batches] * passes):
        if objective is not None:
            objective.compute_advantages(batch)
        take_step(trainer, trainer.accumulate(batch), guard, report, lambda batch=batch: batch, part)  # type: ignore[misc]
        if trainer.topology.is_head and len(report.sizes) < len(report.sums):
            report.sizes.append(loss_size(batch))
    return report


def loss_size(batch: TrainBatch) -> tuple[float, float]:
    """The sum of the loss mask over all response tokens, and the number of samples, of which a part is a fraction."""
    tokens = sum(float(np.sum(mask, dtype=np.float64)) for mask in batch.columns.get("loss_mask", ()))
    parts = np.asarray(batch.columns.get("sample_parts", np.ones(len(batch))), dtype=np.float64)
    return tokens, float(np.sum(1 / parts))


def take_step(
    trainer: Trainer, sums: Sums, guard: NonFiniteGuard, report: StepReport, rows: Callable[[], TrainBatch], part: int
) -> None:
    """The optimizer step on what was accumulated, and its place in ``report``; nothing where it is left out.

    sums: of this rank's rows; those of a rank that is not the head of its replica do not count. rows, part: see
    ``NonFiniteGuard.step``."""
    if not isinstance(sums, Sums) and trainer.topology.is_head:
        raise TrainError(f"accumulate of the trainer returned {sums!r}", expected="buffer_rl.kinds.token_loss.Sums")
    own = sums if trainer.topology.is_head else Sums()

    def step() -> dict[str, float]:
        loss, divisor = summed_over_ranks([own.loss, own.divisor])
        if not math.isfinite(loss) or not math.isfinite(divisor):
            trainer.zero_grad()
            what = f"the loss is not finite: {loss} divided by {divisor}"
            where = f"optimizer step {part} of its rollout"
            hint = "look at the loss metrics of this step and at its rewards; a lower --lr often helps"
            raise NonFiniteError(what, where=where, expected="finite numbers", hint=hint)
        same = trainer.optimizer_step(1 / divisor if divisor else 0.0)
        if not isinstance(same, Mapping) or not {"grad_norm", "lr"} <= same.keys():
            expected = "a mapping with grad_norm and lr"
            raise TrainError(f"optimizer_step of the trainer returned {same!r}", expected=expected)
        return same

    same = guard.step(step, rows, part=part)
    report.non_finite = guard.total
    if same is not None:
        report.sums.append(own)
        report.metrics.append(same)


def row_cost(args: Args) -> RowCost | None:
    """What the policy computes on a row; None if its configuration is not there or not understood."""
    with suppress(ConfigError):
        if args.hf_checkpoint:
            return RowCost.of(text_config(read_config("--hf-checkpoint", args.hf_checkpoint)))
    return None


def train_work(
    args: Args, cost: RowCost, batches: Sequence[TrainBatch], seconds: float, *, recomputes: bool
) -> TrainWork:
    """What a rank computed in its passes over ``batches``."""
    rows = [
        (length, int(response))
        for batch in batches
        for length, response in zip(batch.lengths, batch.columns["response_length"], strict=True)
    ]
    passes = args.num_passes_per_rollout
    return TrainWork(
        flops=passes * 3 * sum(cost.forward(*row) for row in rows),
        recomputed=passes * sum(cost.layers(length) for length, _ in rows) if recomputes else 0,
        seconds=seconds,
        peak_tflops=args.peak_tflops,
    )


def require_old_log_probs(args: Args, batches: Sequence[TrainBatch]) -> None:
    """Raises TrainError where rows of several steps have no old log-probabilities: from the second step on, the ratio
    of new to old probability would be taken to be 1, and nothing would be clipped."""
    if len(batches) * args.num_passes_per_rollout == 1 or is_supervised(args) or args.use_rollout_logprobs:
        return
    for step, batch in enumerate(batches):
        if "old_log_probs" not in batch.columns:
            what = f"mini-batch {step} of {len(batches)} has no old log-probabilities"
            expected = "a column old_log_probs: several steps need them from before the first"
            raise TrainError(what, where=batch.task, expected=expected, hint="call log_probs('actor') before train()")


NON_FINITE_FOLDER = "non_finite"


_CAUSES = ("reward", "ref_log_probs", "teacher_log_probs", "old_log_probs", "advantages", "returns")
"""Columns that a loss is computed from. Log-probabilities of engines are left out, as unknown ones are NaN."""


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

        rows: this rank's share of the step. part: number of the step in its rollout. Raises TrainError, after
        the rows were written, if there are too many such steps in a row."""
        try:
            metrics = optimizer_step()
        except NonFiniteError as error:
            self._in_a_row += 1
            self.total += 1
            file = self._dump(rows, part)
            say(f"{error}\nthe step is left out; its rows are in {file}", file=sys.stderr)
            if self._in_a_row >= self._limit:
                raise self._too_many(error, file) from error
            return None
        self._in_a_row = 0
        return metrics

    def _dump(self, rows: Callable[[], TrainBatch], part: int) -> str:
        """The file with the rows, and which of their columns are not finite; or why they could not be written, which
        must not hide the error of the step."""
        try:
            batch = rows()
            suffix = f"_part_{part}" if part else ""
            file = self._folder / f"step_{batch.rollout_id + 1}_rank_{self._rank}{suffix}.safetensors"
            write_rollout(file, batch)
            wrong = [name for name in _CAUSES if not _is_finite(batch.columns.get(name, ()))]
        except (BufferRLError, OSError, ValueError, TypeError) as error:  # fault boundary: columns may be the user's
            return f"no file ({type(error).__name__}: {error})"
        return f"{file}, which has {' and '.join(wrong)} that are not finite" if wrong else str(file)

    def _too_many(self, error: NonFiniteError, file: str) -> TrainError:
        count = "a step" if self._in_a_row == 1 else f"{self._in_a_row} steps in a row"
        return TrainError(
            f"{count} had a loss or a gradient that is not finite; of the last one, {error.what}",
            where=error.where,
            expected=f"fewer than --max-non-finite-steps {self._limit} in a row",
            hint=f"the rows of the last one are in {file}; {error.hint}",
            see="docs/troubleshooting.md#the-loss-or-the-gradient-is-not-finite",
        )


def _is_finite(column: Sequence[np.ndarray] | np.ndarray) -> bool:
    return all(np.isfinite(row).all() for row in column)


KL_FILE = "kl_coef.json"
"""Beside the files of the trainer backend, which knows nothing of the coefficient; rank 0 writes it."""


class KLControl:
    """Adapts the coefficient of ``objective``, which every rank has; does nothing without ``--kl-target``.

    It changes once a rollout, after its optimizer steps: all mini-batches of a rollout are trained with one
    coefficient, whether advantages are computed of the whole rollout, of each mini-batch, or as groups stream.
    """

    def __init__(self, args: Args, objective: Objective) -> None:
        self._args = args
        self._objective = objective

    def adapt(self, report: StepReport) -> None:
        """Adapt the coefficient to the steps in ``report``, which gets the one that they had, and the divergence that
        was measured. Every rank calls it."""
        report.kl_coef = coefficient = self._objective.kl_coef
        if coefficient is None:
            return
        totals = [sums.metrics[MEASURED_KL] for sums in report.sums if MEASURED_KL in sums.metrics]
        kl, tokens = summed_over_ranks([sum(t.value for t in totals), sum(t.weight for t in totals)])
        if tokens:
            # Rounded, as the order of a sum, which ranks and schedules change, is to change nothing.
            report.measured_kl = float(np.float32(kl / tokens))
            self._objective.kl_coef = adapted_coefficient(self._args, coefficient, report.measured_kl)

    def save(self, path: str) -> None:
        """Write the coefficient, if it is adapted, into the folder ``path``."""
        if self._objective.kl_coef is not None:
            saved = {"option": adapted_option(self._args), "kl_coef": self._objective.kl_coef}
            (Path(path) / KL_FILE).write_text(json.dumps(saved))

    def load(self, path: str) -> None:
        """The inverse of ``save``. The option's value stays if the saved run had a fixed coefficient, and no
        file, or adapted the other one. Raises CheckpointError for a damaged file."""
        file = Path(path) / KL_FILE
        if self._objective.kl_coef is None or not file.exists():
            return
        with raised_as(CheckpointError, "not readable", (OSError, ValueError, TypeError, KeyError), where=str(file)):
            saved = json.loads(file.read_text())
            if saved["option"] == adapted_option(self._args):
                self._objective.kl_coef = float(saved["kl_coef"])
