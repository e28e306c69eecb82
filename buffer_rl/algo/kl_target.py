"""``--kl-target``: how a KL coefficient follows the measured divergence, and the options that it needs. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer_rl.errors import ConfigError
from buffer_rl.options.section import required
from buffer_rl.plan.algorithm import is_supervised, uses_critic

if TYPE_CHECKING:
    from buffer_rl.args import Args


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
    if not in_loss and not in_rewards:
        raise ConfigError(
            "there is no KL coefficient that could be adapted",
            where="--kl-target",
            expected="the coefficient to begin with, above 0",
            hint="add --use-kl-loss --kl-loss-coef C, or --kl-coef C",
        )
    if in_loss and in_rewards:
        raise ConfigError(
            "there are two KL coefficients, and one target",
            where="--kl-target, --kl-coef and --kl-loss-coef",
            hint="take one of the coefficients out",
        )
    if in_rewards and args.num_advantage_workers:
        raise ConfigError(
            "only the trainer, which measures the KL divergence, knows the adapted coefficient of token rewards",
            where="--kl-target and --num-advantage-workers",
            hint="take --num-advantage-workers out, or have the penalty in the loss: --use-kl-loss --kl-loss-coef C",
        )
    if in_rewards and args.stream_gradients and uses_critic(args):
        raise ConfigError(
            "only the policy's trainer knows the adapted coefficient of token rewards, which the critic streams too",
            where="--kl-target and --stream-gradients",
            hint="take one of them out, or have the penalty in the loss: --use-kl-loss --kl-loss-coef C",
        )
    least = MAX_ERROR * _samples(args)
    if args.kl_horizon <= least:
        raise ConfigError(
            f"the KL coefficient would be multiplied by {1 - least / args.kl_horizon:g} after a rollout without any",
            where="--kl-horizon",
            expected=f"more than {least:g}: a fifth of --rollout-batch-size times --n-samples-per-prompt",
        )


def _samples(args: Args) -> int:
    return int(args.rollout_batch_size * args.n_samples_per_prompt)
