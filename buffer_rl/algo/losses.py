"""Losses as formulas: a number for each response token, which the framework masks, weighs, sums and divides; and what
other losses take from PPO: the ratio, its clip range, the clipped surrogate. The loss of a value model is beside them.

Modules of built-in losses import torch, which takes a second, in functions alone: the driver imports them.
Suffix legend: ``_bt`` is ``[num_rows, max_response]``; torch float32; log-probabilities and entropies in nats.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from buffer_rl.kinds.marks import Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, Metric, Reduction, TokenLoss

if TYPE_CHECKING:
    import torch

    from buffer_rl.args import Args

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this many nats before ``exp`` (e^20 is about 5e8, far from overflow in float32). Where the
clamp acts the gradient is 0; a token that far off carries no usable signal, and one infinity would lose the step."""


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp(log_ratio)``, with the log-ratio in nats clamped to ``MAX_LOG_RATIO``."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clip_range(args: Args) -> tuple[float, float]:
    """The lower and upper width of the clip range: ``--eps-clip`` and ``--eps-clip-high``, which is ``--eps-clip``
    where absent (DAPO, arXiv 2503.14476, section 3.1, has two widths)."""
    return args.eps_clip, args.eps_clip if args.eps_clip_high is None else args.eps_clip_high


def clipped_surrogate(args: Args, advantages: torch.Tensor, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high))`` in the shape of ``ratio`` (PPO, arXiv 1707.06347,
    with the negative sign), and where the clip acts.

    With ``eps_clip_c`` a negative advantage costs at most ``eps_clip_c |A|`` (dual clip, arXiv 1912.09729):
    without it the loss of a token whose ratio is large and whose advantage is negative has no bound.
    """
    low, high = clip_range(args)
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    values, acts = free.maximum(clipped), clipped > free
    if args.eps_clip_c is None:
        return values, acts
    ceiling = (-advantages * args.eps_clip_c).where(advantages < 0, math.inf)
    return values.minimum(ceiling), acts | (values > ceiling)


@loss_unit(Unit.TOKEN)
def policy_loss(args: Args, inputs: LossInputs) -> TokenLoss:
    """The clipped surrogate of PPO, with the ratio of new to old probability (``clipped_surrogate``).

    Metrics: ``pg_loss``, weighed as the loss is; ``pg_clipfrac`` and ``ppo_kl`` (k1 estimate of KL(old || new)), means
    over tokens.

    Raises TrainError if there are no advantages, or no log-probabilities that the options name as the old ones.
    """
    log_ratio_bt = inputs.log_probs - inputs.old_log_probs
    values_bt, clipped_bt = clipped_surrogate(args, inputs.advantages, ratio_of(log_ratio_bt))
    return TokenLoss(
        values_bt,
        metrics={"pg_loss": Metric(values_bt, Reduction.LOSS), "pg_clipfrac": clipped_bt, "ppo_kl": -log_ratio_bt},
    )


@loss_unit(Unit.TOKEN)
def sft_loss(args: Args, inputs: LossInputs) -> TokenLoss:
    """The negative log-likelihood of each response token."""
    return TokenLoss(-inputs.log_probs)


@loss_unit(Unit.TOKEN, needs=("returns", "values"))
def value_loss(args: Args, inputs: LossInputs) -> TokenLoss:
    """Half the squared distance of the values to the returns that the estimator sets.

    With ``--value-clip`` c it is ``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``, the form of PPO's
    implementation (Engstrom et al., arXiv 2005.12729, section 3): a value that moved further than c from ``V_old``, the
    column ``values`` from before the first optimizer step, has no gradient unless it moved away from the return.

    Metrics, means over tokens: ``value_clipfrac``, ``values``, ``returns``, and the moments that the step's
    ``explained_variance`` is made of, ``1 - Var(R - V) / Var(R)``. Raises TrainError if one of the columns is
    not there.
    """
    import torch

    values_bt, returns_bt, old_bt = inputs.values, inputs["returns"], inputs["values"]
    squared_bt = (values_bt - returns_bt).square()
    clipped_bt = torch.zeros_like(squared_bt)
    if args.value_clip is not None:
        near_bt = torch.clamp(values_bt, old_bt - args.value_clip, old_bt + args.value_clip)
        bounded_bt = (near_bt - returns_bt).square()
        clipped_bt = (bounded_bt > squared_bt).float()
        squared_bt = torch.maximum(squared_bt, bounded_bt)
    errors_bt = (returns_bt - values_bt).detach()
    metrics = {
        "value_clipfrac": clipped_bt,
        "values": values_bt.detach(),
        "returns": returns_bt,
        "returns_squared": returns_bt.square(),
        "value_error": errors_bt,
        "value_error_squared": errors_bt.square(),
    }
    return TokenLoss(squared_bt / 2, metrics=metrics)
