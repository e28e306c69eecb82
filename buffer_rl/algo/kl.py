"""Estimates of the KL divergence from the policy to the reference, a number for each token (torch, nats)."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from buffer_rl.algo.losses import MAX_LOG_RATIO
from buffer_rl.errors import ConfigError

KLEstimator = Literal["k1", "k2", "k3", "low_var_kl", "k1+", "k3+"]

LOW_VAR_KL_MAX = 10.0
"""Nats above which ``low_var_kl`` is cut off."""


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

    - low_var_kl: k3 cut off at 10 nats, as slime writes it, and verl, whose k3 is this too. It is k3 while ``log p -
      log q`` is between -2.6 and 11; beyond, its value is 10, biased low, and its gradient 0: a token that is furthest
      from the reference is not pulled back.
    - k1+, k3+: the value of k1 or k3 with the gradient of k2 (straight-through): unbiased as value and as loss.

    Raises ConfigError for another estimator.
    """
    if estimator in ("k1+", "k3+"):
        value_bt = kl_estimate(log_probs_bt, ref_log_probs_bt, "k1" if estimator == "k1+" else "k3").detach()
        slope_bt = kl_estimate(log_probs_bt, ref_log_probs_bt, "k2")
        return value_bt + (slope_bt - slope_bt.detach())
    if estimator == "k1":
        return log_probs_bt - ref_log_probs_bt
    if estimator == "k2":
        return (log_probs_bt - ref_log_probs_bt).square() / 2
    if estimator in ("k3", "low_var_kl"):
        log_ratio_bt = (ref_log_probs_bt - log_probs_bt).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        k3_bt = torch.expm1(log_ratio_bt) - log_ratio_bt
        return k3_bt if estimator == "k3" else k3_bt.clamp(max=LOW_VAR_KL_MAX)
    expected = ", ".join(get_args(KLEstimator))
    raise ConfigError(f"there is no KL estimator {estimator!r}", where="--kl-loss-type", expected=expected)
