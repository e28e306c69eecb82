"""Losses as formulas: a number for each response token, which the framework masks, weighs, sums and divides.

Suffix legend: ``_bt`` is ``[num_rows, max_response]``; torch float32; log-probabilities and entropies in nats.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from buffer_rl.contracts import LossInputs, TokenLoss
from buffer_rl.errors import ConfigError
from buffer_rl.scope import Unit, loss_unit
from buffer_rl.token_loss import Metric, Reduction


@loss_unit(Unit.TOKEN)
def policy_loss(args: Any, inputs: LossInputs) -> TokenLoss:
    """The clipped surrogate of PPO (arXiv 1707.06347, equation 7), with the negative sign.

    The ratio of new to old probability is clipped to ``[1 - eps_clip, 1 + eps_clip_high]``; the bounds may differ
    (DAPO, arXiv 2503.14476, section 3.1).

    Reads ``eps_clip`` and ``eps_clip_high``. Metrics: ``pg_loss``, weighed as the loss is; ``pg_clipfrac`` and
    ``ppo_kl`` (k1 estimate of KL(old || new)), means over tokens.

    Raises TrainError if there are no advantages, or no log-probabilities that the options name as the old ones.
    """
    log_ratio_bt = inputs.log_probs - inputs.old_log_probs
    ratio_bt = log_ratio_bt.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    free_bt = -inputs.advantages * ratio_bt
    clipped_bt = -inputs.advantages * ratio_bt.clamp(1 - args.eps_clip, 1 + high)
    values_bt = torch.maximum(free_bt, clipped_bt)
    return TokenLoss(
        values_bt,
        metrics={
            "pg_loss": Metric(values_bt, Reduction.LOSS),
            "pg_clipfrac": clipped_bt > free_bt,
            "ppo_kl": -log_ratio_bt,
        },
    )


@loss_unit(Unit.TOKEN)
def sft_loss(args: Any, inputs: LossInputs) -> TokenLoss:
    """The negative log-likelihood of each response token."""
    return TokenLoss(-inputs.log_probs)


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this many nats before ``exp`` (e^20 is about 5e8, far from overflow in float32). Where the
clamp acts the gradient is 0; a token that far off carries no usable signal, and one infinity would lose the step."""


KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_probs_bt: torch.Tensor, ref_log_probs_bt: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """One estimate a token of the KL divergence from the policy to the reference, in nats, in the shape of
    ``log_probs_bt`` and differentiable in it.

    J. Schulman, "Approximating KL divergence" (2020, joschu.net/blog/kl-approx.html). Tokens are sampled from the
    policy ``p``; the reference is ``q``; the estimated quantity is ``KL(p || q) = E_p[log p - log q]``.

    As *values*, k1 and k3 are unbiased and k2 is not; k1 has the largest variance and can be negative. As *losses*,
    what counts is the expectation of the gradient over tokens from ``p``, with ``r = q / p``:

    - k1: ``E_p[grad log p] = 0``: its gradient pulls nowhere and only adds noise;
    - k2: ``E_p[(log p - log q) grad log p] = grad KL(p || q)``: exact;
    - k3: ``E_p[(1 - r) grad log p] = grad KL(q || p)``: the other direction; the two agree to first order at ``p = q``.

    k1 is ``log p - log q``; k2 is ``(log p - log q)^2 / 2``; k3 is ``r - 1 - log r`` with ``r = q / p``.
    Raises ConfigError for another estimator.
    """
    if estimator == "k1":
        return log_probs_bt - ref_log_probs_bt
    if estimator == "k2":
        return (log_probs_bt - ref_log_probs_bt).square() / 2
    if estimator == "k3":
        log_ratio_bt = (ref_log_probs_bt - log_probs_bt).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(log_ratio_bt) - log_ratio_bt
    raise ConfigError(f"there is no KL estimator {estimator!r}", where="--kl-loss-type", expected="k1, k2 or k3")
