"""Estimates of the KL divergence from the policy to the reference, a number for each token (nats); and the
coefficient that follows a target (``--kl-target``), with the checks of its options. Torch is not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from buffer_rl.algo.losses import MAX_LOG_RATIO
from buffer_rl.args import Args
from buffer_rl.errors import ConfigError
from buffer_rl.options.checks import refuse
from buffer_rl.options.section import required
from buffer_rl.plan.algorithm import is_supervised, uses_critic

if TYPE_CHECKING:
    import torch

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
        k3_bt = log_ratio_bt.expm1() - log_ratio_bt
        return k3_bt if estimator == "k3" else k3_bt.clamp(max=LOW_VAR_KL_MAX)
    expected = ", ".join(get_args(KLEstimator))
    raise ConfigError(f"there is no KL estimator {estimator!r}", where="--kl-loss-type", expected=expected)


MEASURED_KL = "ref_kl"
"""The metric that ``--kl-target`` is compared with: the mean over unmasked tokens of the penalty's own estimate."""

MAX_ERROR = 0.2
"""Bound of the relative error that ``adapted_coefficient`` answers."""


def adapted_coefficient(args: Args, coefficient: float, kl: float) -> float:
    """The coefficient after a rollout whose KL divergence from the reference was ``kl`` nats a token.

    It is multiplied by ``1 + K e`` with the relative error ``e = (kl - target) / target``, clipped to -0.2 and 0.2:
    Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2.2. There K is
    0.1; as in its code, in verl and in OpenRLHF, K is the samples of a rollout divided by ``--kl-horizon``.
    """
    target = required(args.kl_target, "kl_target")
    error = max(-MAX_ERROR, min(MAX_ERROR, (kl - target) / target))
    return float(coefficient * (1 + error * _samples(args) / args.kl_horizon))


def check_kl_target(args: Args) -> None:
    """Raises ConfigError where no coefficient, or more than one, could be adapted, or could not stay above 0."""
    if args.kl_target is None:
        return
    in_loss = args.use_kl_loss and args.kl_loss_coef and not is_supervised(args)
    in_rewards = args.kl_coef and not is_supervised(args)
    hint = "add --use-kl-loss --kl-loss-coef C, or --kl-coef C, which it begins with"
    refuse(not in_loss and not in_rewards, "--kl-target: there is no KL coefficient that could be adapted", hint)
    what = "--kl-target, --kl-coef and --kl-loss-coef: there are two KL coefficients, and one target"
    refuse(in_loss and in_rewards, what, "take one of the coefficients out")
    hint, only = "or have the penalty in the loss: --use-kl-loss --kl-loss-coef C", "knows the adapted coefficient"
    what = f"--kl-target and --num-advantage-workers: only the trainer {only} of token rewards"
    refuse(in_rewards and args.num_advantage_workers, what, f"take --num-advantage-workers out, {hint}")
    what = f"--kl-target and --stream-gradients: only the policy's trainer {only}, and the critic streams rewards too"
    streams = in_rewards and args.stream_gradients and uses_critic(args)
    refuse(streams, what, f"take one of them out, {hint}")
    least, horizon = MAX_ERROR * _samples(args), args.kl_horizon
    what = f"--kl-horizon: the KL coefficient would be multiplied by {1 - least / horizon:g} if there is no divergence"
    expected = f"more than {least:g}: a fifth of --rollout-batch-size times --n-samples-per-prompt"
    refuse(horizon <= least, what, expected=expected)


def _samples(args: Args) -> int:
    return int(args.rollout_batch_size * args.n_samples_per_prompt)
