"""Losses of one micro-batch, as shares of the loss of the whole step.

Suffix legend: ``_bt`` is ``[num_rows, max_response]``; torch float32; log-probabilities and entropies in nats.
Everything here is divided by the totals of the whole step (``LossInputs.total_samples``, ``total_tokens``), so that
the losses, gradients and metrics of all micro-batches and ranks **add up**.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from buffer_rl.algo.aggregation import aggregate
from buffer_rl.contracts import LossInputs, LossOutputs
from buffer_rl.errors import ConfigError, TrainError
from buffer_rl.scope import scoped


@scoped("group")
def policy_loss(args: Any, inputs: LossInputs) -> LossOutputs:
    """The clipped surrogate of PPO (arXiv 1707.06347, equation 7), with a KL penalty and an entropy bonus.

    The ratio of new to old probability is clipped to ``[1 - eps_clip, 1 + eps_clip_high]``; the bounds may differ
    (DAPO, arXiv 2503.14476, section 3.1). The old log-probabilities are ``old_log_probs``, or the engine's under
    ``--use-rollout-logprobs``. Where there are none, the batch is trained by the weights that sampled it: the
    ratio is 1 and only its gradient matters.

    Reads ``eps_clip``, ``eps_clip_high``, ``loss_agg_mode``, ``use_rollout_logprobs``, ``use_kl_loss``,
    ``kl_loss_coef``, ``kl_loss_type``, ``entropy_coef``. Metrics: ``loss``, ``pg_loss``, ``pg_clipfrac``, ``ppo_kl``
    (k1 estimate of KL(old || new)), ``log_probs``, ``entropy`` and, where used, ``kl_loss`` and
    ``train_rollout_logprob_abs_diff``; ``loss``, ``pg_loss`` and ``kl_loss`` are aggregated as the options say, the
    others are means over tokens.

    Raises TrainError if log-probabilities or advantages that the options need are missing.
    """
    mask_bt = inputs.loss_mask
    advantages_bt = _required(inputs.advantages, "advantages", "an advantage estimator must run before the loss")
    old_bt = _old_log_probs(args, inputs)

    log_ratio_bt = torch.where(mask_bt != 0, inputs.log_probs - old_bt, 0.0)
    ratio_bt = log_ratio_bt.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    free_bt = -advantages_bt * ratio_bt
    clipped_bt = -advantages_bt * ratio_bt.clamp(1 - args.eps_clip, 1 + high)

    pg_loss = aggregate(torch.maximum(free_bt, clipped_bt), inputs, args.loss_agg_mode)
    loss = pg_loss
    metrics = {
        "pg_loss": pg_loss,
        "pg_clipfrac": aggregate((clipped_bt > free_bt).float(), inputs, "token-mean"),
        "ppo_kl": aggregate(-log_ratio_bt, inputs, "token-mean"),
        **_token_means(inputs),
    }
    if args.use_kl_loss:
        hint = "the reference model's log-probabilities must be computed before the loss"
        ref_bt = _required(inputs.ref_log_probs, "ref_log_probs", hint)
        kl_bt = kl_estimate(inputs.log_probs, ref_bt, args.kl_loss_type)
        metrics["kl_loss"] = aggregate(kl_bt, inputs, args.loss_agg_mode)
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    if args.entropy_coef:
        loss = loss - args.entropy_coef * aggregate(inputs.entropy, inputs, args.loss_agg_mode)
    if inputs.rollout_log_probs is not None:
        gap_bt = (
            inputs.log_probs.detach() if old_bt is inputs.rollout_log_probs else old_bt
        ) - inputs.rollout_log_probs
        metrics["train_rollout_logprob_abs_diff"] = aggregate(gap_bt.abs(), inputs, "token-mean")
    return _outputs(loss, metrics)


@scoped("group")
def sft_loss(args: Any, inputs: LossInputs) -> LossOutputs:
    """Negative log-likelihood of the unmasked response tokens, aggregated by ``loss_agg_mode``.

    Metrics: ``loss``; ``log_probs`` and ``entropy``, means over tokens.
    """
    loss = aggregate(-inputs.log_probs, inputs, args.loss_agg_mode)
    return _outputs(loss, _token_means(inputs))


def _token_means(inputs: LossInputs) -> dict[str, torch.Tensor]:
    return {
        "log_probs": aggregate(inputs.log_probs, inputs, "token-mean"),
        "entropy": aggregate(inputs.entropy, inputs, "token-mean"),
    }


def _old_log_probs(args: Any, inputs: LossInputs) -> torch.Tensor:
    if args.use_rollout_logprobs:
        hint = "the generate function must keep the engine's log-probabilities"
        return _required(inputs.rollout_log_probs, "rollout_log_probs", hint)
    if inputs.old_log_probs is None:
        on_policy: torch.Tensor = inputs.log_probs.detach()
        return on_policy
    old: torch.Tensor = inputs.old_log_probs
    return old


def _required(tensor: torch.Tensor | None, name: str, hint: str) -> torch.Tensor:
    if tensor is None:
        raise TrainError(f"the batch has no {name}", where="policy_loss", expected=f"a column {name}", hint=hint)
    return tensor


def _outputs(loss: torch.Tensor, metrics: dict[str, torch.Tensor]) -> LossOutputs:
    return LossOutputs(loss=loss, metrics={"loss": loss.detach()} | {k: v.detach() for k, v in metrics.items()})


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
