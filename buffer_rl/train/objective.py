"""A run's loss and advantage estimator, which may be the user's; an error of either names it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from buffer_rl.algo.losses import policy_loss, sft_loss
from buffer_rl.contracts import AdvantageEstimator, LossInputs, LossOutputs, PolicyLoss
from buffer_rl.errors import ConfigError, PluginError, TrainError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.resolution.calls import call, returned, short_repr
from buffer_rl.scope import Scope, needs_of, scope_of
from buffer_rl.train.roles import LOG_PROB_FIELDS, estimator_of
from buffer_rl.types import TrainBatch


class Objective:
    """Resolves ``--custom-loss-function-path`` or ``--loss-type``, and ``--custom-advantage-function-path`` or
    ``--advantage-estimator``. Raises PluginError if one does not resolve.

    supervised: the loss is the built-in supervised one, which has no advantages. scope: of the loss; needs: of the
    estimator (see ``buffer_rl.scope.scoped``). entropy_gradient: whether the loss gets entropies with a gradient:
    any but the built-in losses, and these under ``--entropy-coef``.
    """

    def __init__(self, args: Any, registry: PluginRegistry) -> None:
        self._args = args
        self._loss_name: str = args.custom_loss_function_path or args.loss_type
        self._estimator_name = estimator_of(args)[1]
        self._loss = cast(PolicyLoss, registry.resolve("loss", self._loss_name))
        self._estimator = cast(AdvantageEstimator, registry.resolve("advantage", self._estimator_name))
        self.supervised = self._loss == sft_loss
        self.entropy_gradient = self._loss not in (policy_loss, sft_loss) or args.entropy_coef > 0
        self.scope = scope_of(self._loss)
        self.needs = needs_of(self._estimator)
        waits = scope_of(self._estimator) is not Scope.ROLLOUT
        self._hidden = frozenset(LOG_PROB_FIELDS) - self.needs if waits else frozenset()

    def compute_advantages(self, batch: TrainBatch) -> None:
        """Have the estimator set the columns ``advantages`` and ``returns``: a row's response tokens each, float32.

        An estimator that may be called before the rollout's end sees only the log-probabilities that it declares as
        needed: which others are there depends on the schedule.

        Raises PluginError if it raises, returns something, or leaves one of them out or of another shape.
        """
        kind, name = "advantage", self._estimator_name
        hidden = {column: batch.columns.pop(column) for column in self._hidden & batch.columns.keys()}
        try:
            answer: object = call(kind, name, self._estimator, self._args, batch, at=batch.task)
        except PluginError as error:
            if isinstance(error.__cause__, KeyError) and (absent := self._hidden.intersection(error.__cause__.args)):
                error.hint = f"declare it: buffer_rl.scope.scoped(..., needs=({min(absent)!r},))"
            raise
        batch.columns.update(hidden)
        expected = "None, with batch.columns['advantages'] and ['returns'] set: per row [response_length] float32"
        if answer is not None:
            raise returned(kind, name, answer, expected, at=batch.task)
        for column in ("advantages", "returns"):
            if column not in batch.columns:
                hint = f"it did not set the column {column}"
                raise returned(kind, name, answer, expected, at=batch.task, hint=hint)
            batch.columns[column] = self._checked_column(batch, column, expected)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """The loss of one micro-batch. Raises PluginError if it raises or returns something else."""
        kind, name = "loss", self._loss_name
        outputs: object = call(kind, name, self._loss, self._args, inputs)
        if not isinstance(outputs, LossOutputs):
            raise returned(kind, name, outputs, "buffer_rl.contracts.LossOutputs")
        loss = outputs.loss
        expected = (
            "LossOutputs(loss=a scalar tensor with gradient, from inputs.log_probs or inputs.entropy, metrics=...)"
        )
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not loss.requires_grad:
            raise returned(kind, name, outputs, expected, hint=f"the loss is {short_repr(loss)}")
        metrics: object = outputs.metrics
        if not isinstance(metrics, Mapping) or not all(map(_is_scalar, metrics.values())):
            raise returned(kind, name, outputs, "LossOutputs(loss=..., metrics={name: a scalar})")
        return outputs

    def _checked_column(self, batch: TrainBatch, column: str, expected: str) -> list[np.ndarray]:
        """Float32 rows of the right lengths: a wrong length would be cut or padded without a word."""
        values: Any = batch.columns[column]
        try:
            rows = [np.asarray(row, dtype=np.float32) for row in values]
        except (TypeError, ValueError) as error:
            hint = f"the column {column} holds no rows of numbers: {error}"
            raise returned("advantage", self._estimator_name, values, expected, at=batch.task, hint=hint) from error
        wanted = [(int(length),) for length in batch.columns["response_length"]]
        found = [row.shape for row in rows]
        if found != wanted:
            at = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), None)
            what = f"{len(found)} rows" if at is None else f"row {at} of shape {found[at]}"
            right = f"{len(wanted)} rows" if at is None else f"{wanted[at]}"
            hint = f"the column {column} has {what}, not {right}"
            raise returned("advantage", self._estimator_name, values, expected, at=batch.task, hint=hint)
        return rows


def _is_scalar(value: object) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim == 0 or value.shape == (1,)
    return isinstance(value, int | float | np.number)


def _is_nonzero(loss: torch.Tensor, inputs: LossInputs) -> bool:
    """Whether a loss, or its gradient by what the model computed, is a number other than 0. What is not finite does
    not count: it shows in the gradient that is kept."""
    found = [loss.detach()]
    computed = [t for t in (inputs.log_probs, inputs.entropy) if isinstance(t, torch.Tensor) and t.requires_grad]
    if computed and loss.requires_grad:
        found += torch.autograd.grad(loss, computed, retain_graph=True, allow_unused=True)
    return any(bool((torch.isfinite(t) & (t != 0)).any()) for t in found if t is not None)


class UnscaledShares:
    """Gradients of rows whose step is not known yet: summed without its totals, divided by them when it is complete.

    A loss divides by the step's samples or by its unmasked tokens (``buffer_rl.algo.aggregation``), and neither is
    known while the rollout still runs. So the loss is asked twice for each micro-batch, once as if the step had one
    sample and endlessly many tokens, and once the other way round: each answer holds what is divided by that total
    alone. Gradients are accumulated for the total that ``--loss-agg-mode`` divides by; the other answer must then be 0,
    and so must its gradient: advantages that cancel make a value of 0 with a gradient that would be lost.

    where: the flag that asks for it, for messages.
    """

    def __init__(self, agg_mode: str, where: str = "--stream-gradients") -> None:
        self._where = where
        self._by_tokens = agg_mode == "token-mean"
        self._sums: dict[str, list[torch.Tensor]] = {}

    def unscaled_loss(self, loss: Callable[[LossInputs], LossOutputs], inputs: LossInputs) -> torch.Tensor:
        """The loss of a micro-batch to call ``backward`` on, not divided by any total.

        Raises ConfigError if the loss divides by both totals: its gradient cannot be scaled afterwards."""
        by_samples = loss(replace(inputs, total_samples=1, total_tokens=math.inf))
        by_tokens = loss(replace(inputs, total_samples=math.inf, total_tokens=1))
        kept, other = (by_tokens, by_samples) if self._by_tokens else (by_samples, by_tokens)
        if _is_nonzero(other.loss, inputs):
            raise ConfigError(
                f"the loss divides by the {'samples' if self._by_tokens else 'tokens'} of the step as well",
                where=self._where,
                expected=f"division by its {'tokens' if self._by_tokens else 'samples'} alone, as --loss-agg-mode says",
                hint="aggregate every term with buffer_rl.algo.aggregation.aggregate and args.loss_agg_mode, or take "
                "@scoped('group') from the loss",
            )
        self._add(by_samples, by_tokens)
        return cast(torch.Tensor, kept.loss)

    def divisor(self, total_samples: int, total_tokens: int) -> float:
        """The total that the accumulated gradients are divided by."""
        return float(max(total_tokens if self._by_tokens else total_samples, 1))

    def pop_metrics(self, total_samples: int, total_tokens: int) -> dict[str, float]:
        """The metrics' shares of a step with these totals; the sums start at 0 again."""
        metrics = {
            name: float(samples / max(total_samples, 1) + tokens / max(total_tokens, 1))
            for name, (samples, tokens) in self._sums.items()
        }
        self._sums.clear()
        return metrics

    def clear(self) -> None:
        """Forget the sums of a step that is not taken."""
        self._sums.clear()

    def _add(self, by_samples: LossOutputs, by_tokens: LossOutputs) -> None:
        if set(by_samples.metrics) != set(by_tokens.metrics):
            raise TrainError("the loss returned other metrics for other totals", where=self._where)
        for name in by_samples.metrics:
            pair = [torch.as_tensor(outputs.metrics[name]).detach().double() for outputs in (by_samples, by_tokens)]
            known = self._sums.get(name)
            self._sums[name] = pair if known is None else [old + new for old, new in zip(known, pair, strict=True)]
