"""A run's loss and advantage estimator, which may be the user's; what they do wrong is said under their name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from buffer_rl.algo.losses import policy_loss, sft_loss
from buffer_rl.contracts import AdvantageEstimator, LossInputs, LossOutputs, PolicyLoss
from buffer_rl.errors import PluginError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.resolution.calls import call, returned, short_repr
from buffer_rl.scope import Scope, needs_of, scope_of
from buffer_rl.train.estimator import LOG_PROB_FIELDS, estimator_of
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

        One that declares that it can be called before the rollout's end sees the log-probabilities that it declares
        as needed and no others: which of them are there by then depends on the schedule.

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
