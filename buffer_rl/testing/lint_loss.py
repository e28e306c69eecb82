"""A linter for losses: does one hold what its unit and needs promise? Runs the objective on rows from a seed.

A step's loss, metrics and gradients depend on its samples alone: not on micro-batches, ranks, padding or order, nor,
for losses that give a number for each token, on the parts that a sample fanned out into. ``outcome`` is such a step
on rows whose log-probabilities are given, without a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from buffer_rl.args import Args
from buffer_rl.errors import BufferRLError, PluginError
from buffer_rl.kinds.marks import Unit, needs_of, unit_of
from buffer_rl.kinds.objective import PolicyLoss
from buffer_rl.kinds.token_loss import LossInputs, Metric, Sums, TokenLoss
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.plugin.signature import describe
from buffer_rl.records.groups import RowId, TrainBatch
from buffer_rl.testing import lint
from buffer_rl.testing.lint import Finding, Result
from buffer_rl.trainer.objective import Objective

OUTPUTS = ("log_probs", "entropy", "critic_values")
"""Of the models; columns of the linter's rows that the loss gets with a gradient."""


def lint_loss(
    loss: PolicyLoss, args: Args, *, reference: str = "", seed: int = 0, forms: dict[str, str] | None = None
) -> list[Finding]:
    """The findings on a loss, one a property: form, needs, finite, micro-batches, ranks, order, padding, masked,
    fan-out (unit token), unit, gradient.

    args: the run's options. reference: its name in messages. forms: of columns that it needs, by name: ``token`` or
    ``row``; tried out where absent. Where the form is wrong nothing else is looked at. Raises ConfigError for a unit
    that there is not."""
    run = _Run(loss, args, reference or describe(loss), seed)
    form = lint.checked("form", lambda: run.find_form(forms))
    if form.result is not Result.PASS:
        return [form, run.needs()] if run.undeclared else [form]
    of_parts = [] if run.is_by_row else [run.fan_out]
    checks = [run.finite, run.micro_batches, run.ranks, run.order, run.padding, run.masked, *of_parts]
    return [form, run.needs(), *lint.checked_by_name(*checks, run.unit, run.gradient)]


class _Watched:
    """The loss, its answers and the columns that it reads."""

    def __init__(self, loss: PolicyLoss, reference: str) -> None:
        self._loss, self._reference = loss, reference
        self.unit, self.needs = unit_of(loss), needs_of(loss)
        self.read: set[str] = set()
        self.absent: set[str] = set()
        self.answer: Any = None

    def __call__(self, args: Args, inputs: LossInputs) -> TokenLoss:
        def column(name: str) -> Any:
            found = inputs.get(name)
            (self.absent if found is None else self.read).add(name)
            return found

        mask = inputs.loss_mask.clone()
        self.answer = self._loss(args, replace(inputs, column=column))
        if not torch.equal(mask, inputs.loss_mask):
            raise PluginError("it changes inputs.loss_mask in place", hint="return weights to leave tokens out")
        return self.answer  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return repr(self._reference)


class _Run:
    """A loss, its objective, and the rows that it is tried on."""

    def __init__(self, loss: PolicyLoss, args: Args, reference: str, seed: int) -> None:
        self._loss, self._seed = _Watched(loss, reference), seed
        changes = {"custom_loss_function_path": self._loss, "use_kl_loss": False, "entropy_coef": 0.0}
        self._objective = Objective(args.model_copy(update=changes), PluginRegistry.from_flags(()))
        self.undeclared: set[str] = set()

    @property
    def is_by_row(self) -> bool:
        """Whether there is no promise about parts: of another unit than token, or a number for each row."""
        return self._loss.unit != Unit.TOKEN or self._loss.answer.values.ndim == 1

    def find_form(self, forms: dict[str, str] | None) -> str:
        """Call it with the columns that it declares, then also with those without which it fails."""

        def call_with(form: dict[str, str]) -> str:
            self._loss.absent.clear()
            self._batch = lint.lint_rows(2 * self._seed, form, more=OUTPUTS)
            self._other = lint.lint_rows(2 * self._seed + 1, form, more=OUTPUTS)
            self._wanted = self._step(self._batch)
            self._values = self._answers(self._batch)
            return ""

        return lint.try_forms(self._loss.needs, self.undeclared, forms, call_with, lambda _: set(self._loss.absent))

    def needs(self) -> Finding:
        """Read but not declared, declared but never read."""
        return lint.finding_of_needs(self._loss.needs, self.undeclared, self._loss.absent, self._loss.read)

    def finite(self) -> str:
        """The loss, its metrics and its gradients."""
        for name, gradients in _gradients(self._wanted):
            if text := lint.first_infinite(self._batch, gradients):
                return f"{name}, {text}"
        odd = [(name, value) for name, value in self._wanted.means.items() if not np.isfinite(value)]
        return f"{odd[0][0]}: expected a finite number, found {odd[0][1]}" if odd else ""

    def micro_batches(self) -> str:
        """As many as the unit allows: a row or a group each."""
        return self._differs(blocks=self._units(self._batch))

    def ranks(self) -> str:
        """Two ranks, every other row or group each."""
        units = self._units(self._batch)
        shares = [[index for unit in units[rank::2] for index in unit] for rank in range(2)]
        return self._differs(blocks=shares)

    def order(self) -> str:
        """The rows backwards in one micro-batch."""
        return self._differs(blocks=[list(range(len(self._batch)))[::-1]])

    def padding(self) -> str:
        """Wider micro-batches; what is beyond a response is NaN."""
        return self._differs(padding=3)

    def masked(self) -> str | Finding:
        """Masked tokens hold NaN, then more of them stand at the ends of responses: the loss stays, and they have no
        gradient."""
        masks = self._batch.columns["loss_mask"]
        nothing = replace(self._batch, columns={n: _filled(c, masks) for n, c in self._batch.columns.items()})
        nothing.columns["loss_mask"] = masks
        text = self._differs(nothing)
        for name, gradients in () if text else _gradients(self._wanted):
            zeros = [np.where(mask, gradient, 0) for mask, gradient in zip(masks, gradients, strict=True)]
            if not text and lint.first_difference(self._batch, gradients, zeros):
                text = f"{name} of a masked token is not 0"
        if text:
            return f"with NaN in masked tokens, {text}"
        more = replace(self._batch, columns={n: _lengthened(c) for n, c in self._batch.columns.items()})
        more.columns["response_length"] = np.asarray(self._batch.columns["response_length"]) + MORE
        text = self._differs(more)
        text = text and f"with {MORE} more masked tokens at the end of each response, {text}"
        if text and "response_length" in self._loss.read:  # which counts masked tokens, as some papers do
            return Finding("masked", Result.NOTICE, text)
        return text

    def fan_out(self) -> str:
        """Responses of samples of one part, cut into three; a part may be empty."""
        rows, cuts = [], []
        alone = np.asarray(self._batch.columns["sample_parts"]) == 1
        for row, length, single in zip(self._batch.row_ids, self._batch.columns["response_length"], alone, strict=True):
            ends = [0, length // 2, length // 2 + length // 3, length] if single else [0, length]
            cuts.append(list(itertools.pairwise(ends)))
            rows += [RowId(row.uid, row.sample_index, part if single else row.part) for part in range(len(ends) - 1)]
        columns: dict[str, Any] = {}
        for name, column in self._batch.columns.items():
            if isinstance(column, np.ndarray):
                columns[name] = np.repeat(column, [len(own) for own in cuts])
            elif name != "tokens":
                columns[name] = [row[a:b] for row, own in zip(column, cuts, strict=True) for a, b in own]
        columns["response_length"] = np.asarray([b - a for own in cuts for a, b in own], dtype=np.int32)
        columns["tokens"] = [np.zeros(n + 2, dtype=np.int32) for n in columns["response_length"]]
        found = self._step(lint.with_sizes(replace(self._batch, row_ids=rows, columns=columns)))
        starts = np.cumsum([0, *map(len, cuts)]).tolist()
        joined: dict[str, Any] = {
            f"{name}_gradients": [
                np.concatenate(getattr(found, f"{name}_gradients")[a:b]) for a, b in itertools.pairwise(starts)
            ]
            for name in ("log_prob", "entropy", "value")
        }
        by_row = {
            n for n, m in self._loss.answer.metrics.items() if (m.values if isinstance(m, Metric) else m).ndim == 1
        }
        means = {name: value for name, value in self._wanted.means.items() if name not in by_row}
        text = _difference(self._batch, replace(found, **joined), replace(self._wanted, means=means))
        return text and f"with responses cut into parts, {text}"

    def unit(self) -> str:
        """Numbers beyond the unit change, and the values and weights stay."""
        unit, batch = self._loss.unit, self._batch
        if unit == Unit.TOKEN and self._loss.answer.values.ndim == 1:
            return "expected a number for each token, found one for each row: the unit is row"
        lengths = [int(n) for n in batch.columns["response_length"]]
        rng, kept_rows = np.random.default_rng(self._seed), lint.halves(batch, "group" if unit == Unit.GROUP else "row")
        for half in kept_rows:
            kept = [np.full(n, keep) for n, keep in zip(lengths, half, strict=True)]
            if unit == Unit.TOKEN:
                kept, half = [rng.random(n) < 0.5 for n in lengths], [True] * len(batch)
            found = self._answers(lint.mixed(batch, self._other, kept, rows=half))
            counted = [own & (mask != 0) for own, mask in zip(kept, batch.columns["loss_mask"], strict=True)]
            for name, ours in found.items():
                same = [
                    np.where(keep if len(keep) == len(own) else keep.any(), own, was)
                    for keep, own, was in zip(counted, ours, self._values[name], strict=True)
                ]
                if text := lint.first_difference(batch, same, self._values[name]):
                    return f"with other numbers in other {unit}s, {name}, {text}"
        return ""

    def gradient(self) -> str | Finding:
        """Against one-sided differences of the loss, of which the smaller and the larger bound a subgradient."""
        try:
            leaves = self._leaves(torch.float64)
            total = self._total(leaves)
        except (BufferRLError, RuntimeError):  # a function of float32 alone
            leaves = self._leaves(torch.float32)
            total = self._total(leaves)
        is_double = leaves[0].dtype == self._loss.answer.values.dtype == torch.float64
        step, tolerance = (1e-5, 1e-3) if is_double else (1e-2, 5e-2)
        total.backward()  # type: ignore[no-untyped-call]
        used = [(n, leaf, leaf.grad) for n, leaf in zip(OUTPUTS, leaves, strict=True) if leaf.grad is not None]
        largest = max((float(gradient.abs().max()) for _, _, gradient in used), default=0.0)
        if not largest:
            return "the gradient of every token is 0: nothing would be trained"
        before = float(total.detach())
        for name, leaf, gradient in used:
            for row, mask in enumerate(self._batch.columns["loss_mask"]):
                for token in np.flatnonzero(mask).tolist():
                    sides = sorted(self._side(leaves, leaf, row, token, shift, before) for shift in (-step, step))
                    own, slack = float(gradient[row, token]), tolerance * largest
                    if not sides[0] - slack <= own <= sides[1] + slack:
                        at = f"{name}, row {self._batch.row_ids[row]}, token {token}"
                        text = f"value and gradient differ: {at}: expected {sides[1]:.6g}, found {own:.6g}"
                        return Finding("gradient", Result.NOTICE, f"{text}; fine for a loss with a stop-gradient")
        return ""

    def _side(
        self, leaves: list[torch.Tensor], leaf: torch.Tensor, row: int, token: int, shift: float, before: float
    ) -> float:
        with torch.no_grad():
            was = leaf[row, token].clone()
            leaf[row, token] += shift
            after = float(self._total(leaves))
            leaf[row, token] = was
        return (after - before) / shift

    def _leaves(self, dtype: torch.dtype) -> list[torch.Tensor]:
        return [padded(self._batch.columns[name], dtype=dtype) for name in OUTPUTS]  # type: ignore[arg-type]

    def _total(self, leaves: list[torch.Tensor]) -> torch.Tensor:
        return self._objective(leaves[0], leaves[1], _rows(self._batch), leaves[2])[0]

    def _units(self, batch: TrainBatch) -> list[list[int]]:
        return lint.groups_of(batch) if self._loss.unit == Unit.GROUP else [[index] for index in range(len(batch))]

    def _step(self, batch: TrainBatch, **how: Any) -> Outcome:
        log_probs, entropy, values = (batch.columns[name] for name in OUTPUTS)
        return outcome(self._objective, _rows(batch), log_probs, entropy, values, **how)  # type: ignore[arg-type]

    def _differs(self, batch: TrainBatch | None = None, **how: Any) -> str:
        return _difference(self._batch, self._step(self._batch if batch is None else batch, **how), self._wanted)

    def _answers(self, batch: TrainBatch) -> dict[str, list[np.ndarray]]:
        """Values and weights, per row: of its response tokens, or one."""
        self._step(batch)
        given = {"values": self._loss.answer.values, "weights": self._loss.answer.weights}
        lengths = batch.columns["response_length"]
        return {
            name: [
                np.atleast_1d(row)[:length] if row.ndim else np.atleast_1d(row)
                for row, length in zip(tensor.detach().numpy(), lengths, strict=True)
            ]
            for name, tensor in given.items()
            if tensor is not None
        }


MORE = 2
"""Masked tokens that are added to each response."""


def _rows(batch: TrainBatch) -> TrainBatch:
    """Without the outputs of models, which are no columns of a run."""
    return replace(batch, columns={name: own for name, own in batch.columns.items() if name not in OUTPUTS})


def _filled(column: Any, masks: Any) -> Any:
    """A column of tokens with NaN where they are masked."""
    if isinstance(column, np.ndarray) or len(column[0]) != len(masks[0]):
        return column
    return [np.where(mask, row, np.nan).astype(np.float32) for mask, row in zip(masks, column, strict=True)]


def _lengthened(column: Any) -> Any:
    """A column of tokens with zeros, the mask's value, at the end of each row."""
    return column if isinstance(column, np.ndarray) else [np.append(row, np.zeros(MORE, row.dtype)) for row in column]


def _gradients(found: Outcome) -> list[tuple[str, Sequence[np.ndarray]]]:
    return [
        ("the gradient by log_probs", found.log_prob_gradients),
        ("the gradient by entropy", found.entropy_gradients),
        ("the gradient by values", found.value_gradients),
    ]


def _difference(batch: TrainBatch, found: Outcome, wanted: Outcome) -> str:
    """What differs first: a gradient, the divisor, the loss or a metric; empty if nothing does. Gradients of more
    tokens than the batch has are compared over the batch's."""
    lengths = batch.columns["response_length"]
    for (name, ours), (_, theirs) in zip(_gradients(found), _gradients(wanted), strict=True):
        cut = [row[:length] for row, length in zip(ours, lengths, strict=True)]
        if text := lint.first_difference(batch, cut, theirs):
            return f"{name}, {text}"
    numbers = {"divisor": (found.sums.divisor, wanted.sums.divisor)}
    numbers |= {name: (found.means.get(name, np.nan), value) for name, value in wanted.means.items()}
    for name, (own, value) in numbers.items():
        if not np.isclose(own, value, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"{name}: expected {value:.6g}, found {own:.6g}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of a step: its sums; the numbers that are logged; the gradient of its loss, divided by D, by the log-probability,
    the entropy and the critic's value of each response token: per row ``[response_length]`` each."""

    sums: Sums
    means: dict[str, float]
    log_prob_gradients: list[np.ndarray]
    entropy_gradients: list[np.ndarray]
    value_gradients: Sequence[np.ndarray] = ()


def outcome(
    objective: Objective,
    batch: TrainBatch,
    log_probs: Sequence[Sequence[float]],
    entropy: Sequence[Sequence[float]] | None = None,
    values: Sequence[Sequence[float]] | None = None,
    *,
    blocks: Iterable[Sequence[int]] | None = None,
    padding: int = 0,
) -> Outcome:
    """A step on ``batch``, whose rows are called in ``blocks`` (all together where None), each padded by ``padding``
    more than its longest response, with NaN.

    log_probs, entropy, values: per row ``[response_length]``; no entropy is 0, no values are no critic.
    Raises ValueError if padding gets a gradient."""
    zeros: list[Any] = [np.zeros(len(row)) for row in log_probs]
    given = [log_probs, zeros if entropy is None else entropy, *([] if values is None else [values])]
    sums: list[Sums] = []
    gradients: list[dict[int, np.ndarray]] = [{} for _ in given]
    for block in [range(len(batch))] if blocks is None else blocks:
        leaves = [padded([column[index] for index in block], padding) for column in given]
        loss, part = objective(leaves[0], leaves[1], batch.select(block), leaves[2] if values is not None else None)
        loss.backward()  # type: ignore[no-untyped-call]
        sums.append(part)
        for leaf, found in zip(leaves, gradients, strict=True):
            rows = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for index, row in zip(block, rows.numpy(), strict=True):
                if row[len(log_probs[index]) :].any():
                    raise ValueError(f"row {batch.row_ids[index]}: padding has a gradient")
                found[index] = row[: len(log_probs[index])]
    step = Sums.of(sums)
    scale = 1 / step.divisor if step.divisor else 0.0
    by_row = [[found[index] * scale for index in range(len(batch))] for found in gradients]
    return Outcome(
        sums=step,
        means=step.means(),
        log_prob_gradients=by_row[0],
        entropy_gradients=by_row[1],
        value_gradients=by_row[2] if values is not None else (),
    )


def padded(rows: Sequence[Sequence[float]], padding: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A leaf ``[num_rows, longest + padding]`` that holds the rows, and NaN beyond them."""
    leaf = torch.full((len(rows), max(map(len, rows), default=0) + padding), torch.nan, dtype=dtype)
    for index, row in enumerate(rows):
        leaf[index, : len(row)] = torch.as_tensor(np.asarray(row, dtype=np.float32))
    return leaf.requires_grad_()
