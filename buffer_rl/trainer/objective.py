"""A run's loss and advantage estimator, which may be the user's; an error of either names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from buffer_rl.algo.aggregation import mask_out, metric_totals, per_row, row_mean, row_weights, token_weights
from buffer_rl.algo.corrections import correction_unit, mismatch_metrics, truncated_weights
from buffer_rl.algo.kl import MEASURED_KL, kl_estimate
from buffer_rl.algo.losses import value_loss
from buffer_rl.algo.returns import REVERSE_KL, distil, masks_of, whitened_tokens
from buffer_rl.args import Args
from buffer_rl.errors import DataError, PluginError, short_repr
from buffer_rl.kinds.marks import Scope, Unit, needs_of, unit_of
from buffer_rl.kinds.objective import AdvantageEstimator, Correction, PolicyLoss
from buffer_rl.kinds.token_loss import NEW_FORM, LossInputs, Metric, Reduction, Sums, TokenLoss, hint_for
from buffer_rl.plan.algorithm import (
    adapted_option,
    estimator_needs,
    estimator_of,
    estimator_scope,
    is_supervised,
    loss_of,
    policy_field,
    uses_critic,
)
from buffer_rl.plan.roles import ACTOR, CRITIC, DERIVED_FIELDS, MODEL_FIELDS
from buffer_rl.plugin.calls import call, place, returned
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Column, TrainBatch
from buffer_rl.trainer.collate import padded_column, response_mask, sample_sizes
from buffer_rl.trainer.logprob_gate import rows_of_version

LOG_PROB_GAP = "train_rollout_logprob_abs_diff"

OWN_METRICS = frozenset(
    {"loss", "kl_loss", "grad_norm", "lr", "kl_coef", "divisor", "loss_tokens", "loss_samples", MEASURED_KL}
)
"""Names of metrics that a loss cannot give."""


class Objective:
    """Resolves ``--custom-loss-function-path`` or ``--loss-type``, and ``--custom-advantage-function-path`` or
    ``--advantage-estimator``. Raises PluginError if one does not resolve.

    role: the trained role; the loss of the critic is ``buffer_rl.algo.losses.value_loss``. critic: whether it is that.
    supervised: the loss is the built-in supervised one, which has no advantages, no KL penalty and no entropy bonus.
    temperature: the divisor of logits: the sampling temperature, so that ratios compare equal distributions. Greedy
    sampling (0) has no such distribution, and supervised tokens were not sampled: both use 1. unit: of the loss;
    scope, needs: of the estimator (see ``buffer_rl.kinds.marks``).
    """

    def __init__(self, args: Args, registry: PluginRegistry, role: str = ACTOR) -> None:
        self._args = args
        self.critic = role == CRITIC
        self._loss_name = "value_loss" if self.critic else loss_of(args)
        self._estimator_name = estimator_of(args)[1]
        self._loss = value_loss if self.critic else cast("PolicyLoss", registry.resolve("loss", self._loss_name))
        self._estimator = cast("AdvantageEstimator", registry.resolve("advantage", self._estimator_name))
        self.supervised = is_supervised(args)
        sampled = not self.supervised and args.rollout_temperature > 0
        self.temperature = float(args.rollout_temperature) if sampled else 1.0
        self._correction_name = args.custom_tis_function_path or args.tis_mode
        self._correction: Correction | None = None  # between engine and trainer
        self.unit = unit_of(self._loss)
        if args.use_tis and not self.critic and not self.supervised:  # the supervised loss has no ratios
            path = args.custom_tis_function_path
            self._correction = cast("Correction", registry.resolve("correction", path)) if path else truncated_weights
            own = unit_of(self._correction) if path else correction_unit(args)
            self.unit = max(self.unit, own, key=list(Unit).index)
        self.scope = estimator_scope(args, self._estimator)
        self.needs = estimator_needs(args, self._estimator)
        self._hidden = frozenset(MODEL_FIELDS) - self.needs if self.scope is not Scope.ROLLOUT else frozenset()
        self._adapted = adapted_option(args)

    @property
    def kl_coef(self) -> float | None:
        """The coefficient that ``--kl-target`` adapts; None where it is fixed. Estimator and loss see the newest one in
        their ``args``."""
        return None if self._adapted is None else float(getattr(self._args, self._adapted))

    @kl_coef.setter
    def kl_coef(self, value: float) -> None:
        if self._adapted is not None:
            self._args = self._args.model_copy(update={self._adapted: value})

    def __call__(
        self,
        log_probs: torch.Tensor | None,
        entropy: torch.Tensor | None,
        rows: TrainBatch,
        values: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Sums]:
        """The loss of a micro-batch, summed over ``rows`` and not divided, and its sums (see
        ``buffer_rl.kinds.objective.Objective``). Raises PluginError if the loss raises or returns something else,
        TrainError for a column that is needed and not there."""
        mask_bt = response_mask(rows, cast("torch.Tensor", values if self.critic else log_probs))
        inputs = self._inputs(log_probs, entropy, rows, values, mask_bt)
        loss = self._checked_loss(inputs)
        tokens_b, parts_b = sample_sizes(rows, mask_bt)
        if loss.weights is not None:
            mask = mask_bt if loss.weights.ndim == 2 else (mask_bt != 0).any(-1).float()
            weights = mask_out(loss.weights.detach(), mask)
            if bool((weights < 0).any()):
                hint = "the weights of a loss are not negative: put the sign into the values"
                raise returned("loss", self._loss_name, loss, "TokenLoss with weights from 0", hint=hint)
            divisor = weights.sum(dtype=torch.float64)
        elif loss.values.ndim == 2:
            weights, divisor = token_weights(self._args.loss_agg_mode, mask_bt, tokens_b, parts_b)
        else:
            weights, divisor = row_weights(mask_bt, parts_b)
        engine_bt = self._comparable_log_probs(rows, mask_bt)
        total, metrics = loss.values, self._metrics(inputs, loss, engine_bt)
        if self._correction is not None:
            correction_bt = self._checked_correction(inputs)
            total = total * (correction_bt if total.ndim == 2 else row_mean(correction_bt, mask_bt))
            metrics |= mismatch_metrics(inputs, correction_bt)
        for name, coefficient, term_bt in self._terms(inputs):
            term = term_bt if total.ndim == 2 else per_row(term_bt, mask_bt, self._args.loss_agg_mode)
            total = total + coefficient * term
            if name:
                metrics[name] = Metric(term, Reduction.LOSS)
        loss_sum = mask_out(total, weights).sum()
        totals = metric_totals(metrics, weights, mask_bt, parts_b)
        if engine_bt is not None and LOG_PROB_GAP in totals and LOG_PROB_GAP not in loss.metrics:
            known_bt = (mask_bt != 0) & ~engine_bt.isnan()
            totals[LOG_PROB_GAP] = replace(totals[LOG_PROB_GAP], weight=known_bt.sum(dtype=torch.float64))
        return loss_sum, Sums(loss=loss_sum.detach().double(), divisor=divisor, metrics=totals)

    def compute_advantages(self, batch: TrainBatch) -> None:
        """Have the estimator set the columns ``advantages`` and ``returns``: a row's response tokens each, float32.
        Advantages that the rows have already, from a role or the user's converter, are kept, as returns too where these
        are absent. With ``--use-opd`` the log-ratio to the teacher is subtracted from those of the estimator.

        An estimator that may be called before the rollout's end sees only the log-probabilities that it declares as
        needed: which others are there depends on the schedule. The supervised loss has no advantages: nothing is done.

        Raises PluginError if it raises, returns something, needs a column that is not there, replaces another one than
        these two, or leaves one of them out or of another shape; DataError where ``--use-opd`` meets advantages of a
        converter, or a critic those without returns.
        """
        if self.supervised or not batch.row_ids:
            return
        if "advantages" in batch.columns:
            if "returns" not in batch.columns and uses_critic(self._args):
                what = "the rows have advantages of their own and no returns, which the critic is trained on"
                raise DataError(what, where=batch.task, expected="a column returns beside advantages")
            batch.columns.setdefault("returns", batch.columns["advantages"])
            if self._args.use_opd and REVERSE_KL not in batch.columns:
                what = "the rows have advantages of their own, which --use-opd does not change"
                raise DataError(what, where=batch.task, expected="advantages of an estimator")
            return
        kind, name = "advantage", self._estimator_name
        self._require(kind, name, self.needs, batch)
        hidden = {column: batch.columns.pop(column) for column in self._hidden & batch.columns.keys()}
        before = {column: rows for column, rows in batch.columns.items() if column != "returns"}
        batch.columns = _ReadColumns(batch, place(kind, name))
        try:
            answer: object = call(kind, name, self._estimator, self._args, batch, at=batch.task)
        except PluginError as error:
            undeclared = frozenset(MODEL_FIELDS) - self.needs
            if isinstance(error.__cause__, KeyError) and (absent := undeclared.intersection(error.__cause__.args)):
                error.hint = f"declare it: buffer_rl.kinds.marks.scoped(..., needs=({min(absent)!r},))"
            raise
        batch.columns = dict(batch.columns) | hidden
        where = place(kind, name, batch.task)
        expected = "None, with batch.columns['advantages'] and ['returns'] set: per row [response_length] float32"
        if answer is not None:
            raise returned(kind, name, answer, expected, at=batch.task)
        # Others would see it in some schedules, and in some not.
        if replaced := [column for column, rows in before.items() if batch.columns.get(column) is not rows]:
            what = f"it replaced the column {replaced[0]!r}"
            raise PluginError(what, where=where, expected=expected, hint="set one of another name")
        for column in ("advantages", "returns"):
            if column not in batch.columns:
                raise PluginError(f"it did not set the column {column}", where=where, expected=expected)
            batch.columns[column] = _checked_column(batch, column, where=where, expected=expected)
        if self._args.use_opd:
            distil(self._args, batch)
        if self._args.normalize_advantages:
            batch.columns["advantages"] = whitened_tokens(batch.columns["advantages"], masks_of(batch))

    def _inputs(
        self,
        log_probs: torch.Tensor | None,
        entropy: torch.Tensor | None,
        rows: TrainBatch,
        values: torch.Tensor | None,
        mask_bt: torch.Tensor,
    ) -> LossInputs:
        """Masked positions are 0 everywhere: a formula may then be infinite or NaN nowhere that does not count."""
        self._require("loss", self._loss_name, needs_of(self._loss) - {"old_log_probs"}, rows)
        if self._correction is not None:
            self._require("correction", self._correction_name, needs_of(self._correction) - {"old_log_probs"}, rows)

        def column(name: str) -> Any:
            if name == "old_log_probs" and self._args.use_rollout_logprobs:
                return inputs["rollout_log_probs"]
            _require_given(rows, name, f"{place('loss', self._loss_name)}, or its correction,")
            found = _masked_column(rows, name, mask_bt)
            return inputs.log_probs.detach() if name == "old_log_probs" and found is None else found

        outputs = {"log_probs": log_probs, "entropy": entropy, "values": values}
        masked: Any = {name: None if o is None else torch.where(mask_bt != 0, o, 0.0) for name, o in outputs.items()}
        inputs = LossInputs(**masked, loss_mask=mask_bt, row_ids=rows.row_ids, column=column)
        return inputs

    def _require(self, kind: str, name: str, needs: frozenset[str], batch: TrainBatch) -> None:
        if absent := sorted(needs - batch.columns.keys()):
            what = f"it needs the column {absent[0]!r}, which the rows do not have"
            expected = f"a column beside {', '.join(sorted(batch.columns))}"
            raise PluginError(what, where=place(kind, name, batch.task), expected=expected, hint=hint_for(absent[0]))
        for column in needs:
            _require_given(batch, column, place(kind, name))

    def _terms(self, inputs: LossInputs) -> list[tuple[str, float, torch.Tensor]]:
        """What the framework adds to any loss but the supervised one: name of the metric, coefficient, and a number for
        each token."""
        args, terms = self._args, []
        if self.supervised or self.critic:
            return []
        if args.use_kl_loss:
            kl_bt = kl_estimate(inputs.log_probs, inputs.ref_log_probs, args.kl_loss_type)
            terms.append(("kl_loss", args.kl_loss_coef, kl_bt))
        if args.entropy_coef:
            terms.append(("", -args.entropy_coef, inputs.entropy))
        return terms

    def _comparable_log_probs(self, rows: TrainBatch, mask_bt: torch.Tensor) -> torch.Tensor | None:
        """The column ``rollout_log_probs``, NaN in rows that no engine sampled from the weights that are trained; None
        if all rows are such."""
        found, same = _masked_column(rows, "rollout_log_probs", mask_bt), rows_of_version(self._args, rows)
        if found is None or same.all():
            return found
        other_b = torch.as_tensor(~same, device=found.device)
        return found.masked_fill(other_b[:, None], math.nan) if same.any() else None

    def _metrics(self, inputs: LossInputs, loss: TokenLoss, engine_bt: torch.Tensor | None) -> dict[str, Any]:
        """The loss's own metrics, and those of every loss of a policy. engine_bt: the engine's log-probabilities that
        are comparable with the trainer's."""
        if self.critic:
            return dict(loss.metrics)
        metrics = {"log_probs": inputs.log_probs, "entropy": inputs.entropy, **loss.metrics}
        if not self.supervised and engine_bt is not None:
            ours = inputs.log_probs if self._args.use_rollout_logprobs else inputs.old_log_probs
            metrics.setdefault(LOG_PROB_GAP, torch.where(engine_bt.isnan(), 0.0, (ours - engine_bt).abs()))
        if (reverse_kl := inputs.get(REVERSE_KL)) is not None:
            metrics[REVERSE_KL] = reverse_kl
        if self._adapted is not None:
            metrics[MEASURED_KL] = self._measured_kl(inputs)
        return metrics

    def _measured_kl(self, inputs: LossInputs) -> torch.Tensor:
        """The estimate, a number for each token, that the adapted coefficient is multiplied by."""
        if self._adapted == "kl_loss_coef":
            return kl_estimate(inputs.log_probs, inputs.ref_log_probs, self._args.kl_loss_type)
        return kl_estimate(inputs[policy_field(self._args)], inputs.ref_log_probs, "k1")

    def _checked_correction(self, inputs: LossInputs) -> torch.Tensor:
        """What the values are multiplied by ``[num_rows, max_response]``; a number for each row takes the mean."""
        kind, name = "correction", self._correction_name
        answer: object = call(kind, name, cast("Correction", self._correction), self._args, inputs)
        shape = inputs.log_probs.shape
        if not isinstance(answer, torch.Tensor) or answer.shape != shape:
            hint = f"the weights are {_shown(answer)}" if isinstance(answer, torch.Tensor) else ""
            raise returned(kind, name, answer, f"a tensor of weights {list(shape)}", hint=hint)
        return answer.detach()

    def _checked_loss(self, inputs: LossInputs) -> TokenLoss:
        kind, name = "loss", self._loss_name
        answer: object = call(kind, name, self._loss, self._args, inputs)
        wrong = partial(returned, kind, name, answer)
        outputs_bt = inputs.values if self.critic else inputs.log_probs
        shape = tuple(outputs_bt.shape)
        expected = f"buffer_rl.kinds.token_loss.TokenLoss with values {list(shape)} or {list(shape[:1])}"
        if not isinstance(answer, TokenLoss):
            raise wrong("buffer_rl.kinds.token_loss.TokenLoss", hint=NEW_FORM)
        values, weights = answer.values, answer.weights
        if not isinstance(values, torch.Tensor) or tuple(values.shape) not in (shape, shape[:1]):
            hint = NEW_FORM if getattr(values, "ndim", 1) == 0 else f"the values are {_shown(values)}"
            raise wrong(expected, hint=hint)
        if not values.requires_grad and outputs_bt.requires_grad:
            hint = "the values have no gradient: compute them from inputs.log_probs, inputs.entropy or inputs.values"
            raise wrong(expected, hint=hint)
        if weights is not None and (not isinstance(weights, torch.Tensor) or weights.shape != values.shape):
            raise wrong(expected, hint=f"the weights are {_shown(weights)}, not of the shape of the values")
        if not isinstance(answer.metrics, Mapping):
            raise wrong("TokenLoss(values, metrics={name: a tensor or Metric})")
        for metric, given in answer.metrics.items():
            if metric in OWN_METRICS:
                raise wrong("metrics of other names", hint=f"{metric!r} is the framework's own")
            if problem := _metric_problem(given if isinstance(given, Metric) else Metric(given), shape, values):
                tensors = f"a tensor {list(shape)} or {list(shape[:1])}, or Metric(values, reduction) of one"
                raise wrong(tensors, hint=f"the metric {metric!r} {problem}")
        return answer


def _checked_column(batch: TrainBatch, column: str, *, where: str, expected: str) -> list[np.ndarray]:
    """Float32 rows of the right lengths: a wrong length would be cut or padded without a word."""
    values: Any = batch.columns[column]
    try:
        rows = [np.asarray(row, dtype=np.float32) for row in values]
    except (TypeError, ValueError) as error:
        what = f"the column {column} holds no rows of numbers: {error}"
        raise PluginError(what, where=where, expected=expected) from error
    wanted = [(int(length),) for length in batch.columns["response_length"]]
    found = [row.shape for row in rows]
    if found != wanted:
        at = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), None)
        what = f"{len(found)} rows" if at is None else f"row {at} of shape {found[at]}"
        right = f"{len(wanted)} rows" if at is None else f"{wanted[at]}"
        raise PluginError(f"the column {column} has {what}, not {right}", where=where, expected=expected)
    return rows


class _ReadColumns(dict[str, Column]):
    """The columns of a batch as an estimator sees them: it reads none that the rollout did not give for each row."""

    def __init__(self, batch: TrainBatch, reader: str) -> None:
        super().__init__(batch.columns)
        self._rows = replace(batch)
        self._reader = reader

    def __getitem__(self, name: str) -> Column:
        _require_given(self._rows, name, self._reader)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        _require_given(self._rows, name, self._reader)
        return super().get(name, default)


def _require_given(batch: TrainBatch, column: str, reader: str) -> None:
    """Raises DataError, naming the row, if the rollout did not give a column that is read. (What a model computed may
    be NaN: that is for ``--max-non-finite-steps``.)"""
    if column not in DERIVED_FIELDS and (rows := batch.rows_without(column)):
        what = f"{reader} reads {column}, and this row has none"
        expected = "a finite number for each token that is trained on"
        raise DataError(what, where=f"row {rows[0]}, {batch.task}", expected=expected, hint=hint_for(column))


def _masked_column(rows: TrainBatch, name: str, mask_bt: torch.Tensor) -> torch.Tensor | None:
    """The column, 0 where a token is masked; None where the rows do not have it."""
    found = padded_column(rows, name, mask_bt)
    return torch.where(mask_bt != 0, found, 0.0) if found is not None and found.ndim == 2 else found


def _metric_problem(metric: Metric, shape: tuple[int, ...], values: torch.Tensor) -> str:
    """What is wrong with a metric of a loss that returned ``values``, for ``[num_rows, width]`` tokens; empty if
    nothing is."""
    if metric.reduction not in set(Reduction):
        return f"has the reduction {metric.reduction!r}, not one of {', '.join(Reduction)}"
    if not isinstance(metric.values, torch.Tensor) or tuple(metric.values.shape) not in (shape, shape[:1]):
        return f"is {_shown(metric.values)}, not a number for each token or row"
    if metric.reduction == Reduction.LOSS and metric.values.shape != values.shape:
        return f"has the reduction 'loss' and the shape {list(metric.values.shape)}, not that of the values"
    return ""


def _shown(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else short_repr(value)
