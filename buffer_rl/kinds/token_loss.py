"""What a policy loss receives and returns, and the sums that losses of micro-batches and ranks add up to.

A loss is a formula: it gives a number for each response token, or for each row. The framework masks and weighs these
numbers, adds the KL penalty and the entropy bonus, sums, and divides by one divisor before the optimizer step. All
tensors are torch float32, on the trainer's device; log-probabilities and entropies are in nats.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from buffer_rl.errors import TrainError
from buffer_rl.records.groups import RowId

NEW_FORM = """a loss returns a number for each token, and the framework masks, weighs, sums and divides:

    from buffer_rl.kinds.token_loss import TokenLoss

    def my_loss(args, inputs):
        values = -inputs.advantages * (inputs.log_probs - inputs.old_log_probs).exp()  # [num_rows, max_response]
        return TokenLoss(values, metrics={"my_loss": values.detach()})"""
"""Shown to a loss of the earlier form, which returned a scalar that it had divided itself."""


class Reduction(StrEnum):
    """How a metric's values become one number: the mean over unmasked tokens (of one number a row: over samples), the
    largest, the smallest; ``loss``: weighed and divided as the loss is."""

    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    LOSS = "loss"


@dataclass(slots=True)
class Metric:
    """values: ``[num_rows, max_response]`` or ``[num_rows]``. What is no mean, such as an effective sample size, is
    computed from two means."""

    values: Any
    reduction: Reduction | str = Reduction.MEAN


@dataclass(slots=True)
class TokenLoss:
    """What a policy loss returns.

    values: ``[num_rows, max_response]``, or ``[num_rows]`` for a loss of whole sequences, with a gradient.
    weights: of the same shape, not negative; taken without a gradient. The loss of a step is
        ``sum(weights x values) / sum(weights)`` over all of its rows; a token of weight 0 leaves the divisor. None: as
        ``--loss-agg-mode`` says for tokens; for ``[num_rows]`` values a mean over samples. Masked tokens have weight 0
        whatever is given here. In a step whose weights are all 0 the gradient is 0.
    metrics: tensors, whose mean is logged, or ``Metric``.

    Example:
        log_probs = torch.tensor([[-0.5, -2.0], [-1.0, 0.0]], requires_grad=True)  # two rows; the last token is padding
        advantages = torch.tensor([[0.5, 0.5], [-0.5, 0.0]])
        likely = (log_probs > -1.5).float()  # the second token of the first row is left out, and not in the divisor
        TokenLoss(-advantages * log_probs, weights=likely, metrics={"likely": likely})
    """

    values: Any
    weights: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False, repr=False)
class LossInputs:
    """What a policy loss sees: the response tokens of one micro-batch, padded to ``[num_rows, max_response]``.

    log_probs, entropy: of the policy that is trained, with a gradient. values: of a critic, with a gradient; None
    without one. loss_mask: 1 for tokens that are trained on; where it is 0, all others of its shape are 0 as well.
    row_ids: prompt group, sample and part of each row. ``inputs["NAME"]`` is the column NAME of the batch: padded like
    the others, or ``[num_rows]`` where it has a number a row. Raises TrainError for a column that is not there.
    """

    log_probs: Any
    entropy: Any
    loss_mask: Any
    row_ids: list[RowId]
    column: Callable[[str], Any]
    """The tensor of a column by its name, None where the batch has no such column; asked once a name."""
    values: Any = None
    _known: dict[str, Any] = field(default_factory=dict, init=False)

    def __getitem__(self, name: str) -> Any:
        tensor = self.get(name)
        if tensor is None:
            raise TrainError(f"the rows have no {name}", where="loss", expected=f"a column {name}", hint=hint_for(name))
        return tensor

    def __getattr__(self, name: str) -> Any:
        if name in ("total_samples", "total_tokens", "sample_total_tokens"):  # of the earlier contract
            raise AttributeError(f"there is no {name} any more: {NEW_FORM}")
        raise AttributeError(f"the inputs of a loss have no {name!r}; a column is inputs[{name!r}]")

    def get(self, name: str) -> Any:
        """The column, or None where the batch has none."""
        if name not in self._known:
            self._known[name] = self.column(name)
        return self._known[name]

    @property
    def advantages(self) -> Any:
        """Of the advantage estimator."""
        return self["advantages"]

    @property
    def old_log_probs(self) -> Any:
        """Under the policy that the ratio is taken to: the trainer's weights before the first optimizer step of the
        rollout, or the engine's numbers under ``--use-rollout-logprobs``. Without either, as with one optimizer step a
        rollout, ``log_probs`` without its gradient: the ratio is 1."""
        return self["old_log_probs"]

    @property
    def ref_log_probs(self) -> Any:
        """Under the reference model."""
        return self["ref_log_probs"]

    @property
    def rollout_log_probs(self) -> Any:
        """The engine's, of the tokens that it sampled."""
        return self["rollout_log_probs"]


def hint_for(column: str) -> str:
    """What gives a column that is not there."""
    return HINTS.get(column, "a function of --custom-convert-samples-to-train-data-path may give it")


HINTS = {
    "advantages": "an advantage estimator must run before the loss",
    "returns": "an advantage estimator must run before the loss",
    "ref_log_probs": "the reference model's log-probabilities must be computed before the loss: add --use-kl-loss "
    "(with --kl-loss-coef 0 for no KL penalty)",
    "teacher_log_probs": "add --opd-teacher-load PATH, or set it on the samples, as a generate function can",
    "values": "add --use-critic, or a function of --custom-convert-samples-to-train-data-path that gives them",
    "baseline_reward": "the default rollout function gives it where no converter of samples of yours makes the columns",
    "rollout_log_probs": "the generate function must keep the engine's log-probabilities",
}


@dataclass(frozen=True, slots=True)
class Total:
    """One metric's sum: of its values and of their weights; for ``max`` and ``min`` the value so far, of how many."""

    reduction: Reduction
    value: Any
    weight: Any = 0.0

    def __add__(self, other: Total) -> Total:
        combine: Any = {Reduction.MAX: max, Reduction.MIN: min}.get(self.reduction, operator.add)
        return Total(self.reduction, combine(self.value, other.value), self.weight + other.weight)


VALUE_MOMENTS = frozenset({"value_error", "value_error_squared", "returns", "returns_squared"})
"""Metrics of ``buffer_rl.algo.losses`` that its ``explained_variance`` is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Of some rows: ``loss``, the sum of weights times values, framework terms included; ``divisor`` (D), which the
    step's loss is divided by; metrics. Sums of micro-batches and ranks add up to those of the step. The numbers may be
    tensors without a gradient until ``resolved``."""

    loss: Any = 0.0
    divisor: Any = 0.0
    metrics: Mapping[str, Total] = field(default_factory=dict)

    def __add__(self, other: Sums) -> Sums:
        both = {name: total + other.metrics[name] for name, total in self.metrics.items() if name in other.metrics}
        return Sums(
            loss=self.loss + other.loss,
            divisor=self.divisor + other.divisor,
            metrics={**self.metrics, **other.metrics, **both},
        )

    @staticmethod
    def of(parts: Iterable[Sums]) -> Sums:
        """The sum of all parts, resolved."""
        return sum(parts, Sums()).resolved()

    def resolved(self) -> Sums:
        """The same with Python numbers."""
        metrics = {name: Total(t.reduction, float(t.value), float(t.weight)) for name, t in self.metrics.items()}
        return Sums(loss=float(self.loss), divisor=float(self.divisor), metrics=metrics)

    def means(self) -> dict[str, float]:
        """The numbers of a whole step by name, ``loss`` among them. A mean over nothing is 0; the largest or smallest
        of nothing is left out."""
        found = {"loss": _ratio(self.loss, self.divisor)}
        for name, total in self.metrics.items():
            if total.reduction is Reduction.MEAN:
                found[name] = _ratio(total.value, total.weight)
            elif total.reduction is Reduction.LOSS:
                found[name] = _ratio(total.value, self.divisor)
            elif total.weight:
                found[name] = float(total.value)
        if "mismatch/chi2" in found:  # Kish's, of the importance weights of buffer_rl.algo.corrections
            found["mismatch/ess"] = found["mismatch/weight"] ** 2 / (1 + found["mismatch/chi2"])
        if found.keys() >= VALUE_MOMENTS:
            error = found.pop("value_error_squared") - found["value_error"] ** 2
            squared = found.pop("returns_squared")
            spread = squared - found["returns"] ** 2
            rounding = 1e-6 * squared  # of float32 squares: what is left of equal returns
            found["explained_variance"] = 1 - error / spread if spread > rounding else 0.0
        return found


def _ratio(value: float, weight: float) -> float:
    return float(value / weight) if weight else 0.0
