"""Estimators of the KL divergence from the policy to the reference, for each sampled token.

J. Schulman, "Approximating KL divergence" (2020, joschu.net/blog/kl-approx.html). Tokens are sampled from the policy
``p``; the reference is ``q``; the estimated quantity is ``KL(p || q) = E_p[log p - log q]``, in nats.

Suffix legend: ``_bt`` is ``[num_rows, max_response]`` (any other shape works too); torch float32.

As *values*, k1 and k3 are unbiased and k2 is not; k1 has the largest variance and can be negative. As *losses*, what
counts is the expectation of the gradient over tokens from ``p``, with ``r = q / p``:

- k1: ``E_p[grad log p] = 0``: its gradient pulls nowhere and only adds noise;
- k2: ``E_p[(log p - log q) grad log p] = grad KL(p || q)``: exact;
- k3: ``E_p[(1 - r) grad log p] = grad KL(q || p)``: the other direction; the two agree to first order at ``p = q``.
"""

from __future__ import annotations

from typing import Literal

import torch

from buffer_rl.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this many nats before ``exp`` (e^20 is about 5e8, far from overflow in float32). Where the
clamp acts the gradient is 0; a token that far off carries no usable signal, and one infinity would lose the step."""

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_probs_bt: torch.Tensor, ref_log_probs_bt: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """One estimate a token, in the shape of ``log_probs_bt``; differentiable in it.

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
