"""Losses as formulas: a number for each response token or row, which the framework masks, weighs, sums and divides; and
what they have in common: the ratio, its clip range, the clipped surrogate. The loss of a value model is among them.

Torch, which takes a second, is imported in functions alone: the driver imports this module.
Suffix legend: ``_bt`` is ``[num_rows, max_response]``, ``_b`` is ``[num_rows]``; torch float32; log-probabilities and
entropies in nats. Each part of a sample that fanned out is a row of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from buffer_rl.algo.aggregation import row_mean
from buffer_rl.args import Args
from buffer_rl.kinds.marks import Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, Metric, Reduction, TokenLoss

if TYPE_CHECKING:
    import torch

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


@loss_unit(Unit.ROW)
def gspo(args: Args, inputs: LossInputs) -> TokenLoss:
    """GSPO: ratios and clipping of whole sequences in place of tokens (arXiv 2507.18071). Equation 5, with the negative
    sign: a number for each row ``[num_rows]``, a mean over samples whatever ``--loss-agg-mode`` says.

    The ratio of a row is the geometric mean of its tokens' ratios (equation 7), ``s_i = exp(mean_t log r_t)``, far
    closer to 1 than they are: the paper clips at 3e-4 and 4e-4 (``--eps-clip 3e-4 --eps-clip-high 4e-4``).
    The advantage of a row is the mean over its tokens: the group-normalised reward (equation 6), which GRPO gives to
    every token alike. ``--eps-clip-c`` counts as in ``policy_loss``.

    Metrics, means over samples: ``sequence_clipfrac``; ``ppo_kl``, k1 a token.
    """
    log_ratio_b = row_mean(inputs.log_probs - inputs.old_log_probs, inputs.loss_mask)
    advantages_b = row_mean(inputs.advantages, inputs.loss_mask)
    values_b, clipped_b = clipped_surrogate(args, advantages_b, ratio_of(log_ratio_b))
    return TokenLoss(values_b, metrics={"sequence_clipfrac": clipped_b, "ppo_kl": -log_ratio_b})


@loss_unit(Unit.ROW)
def gspo_token(args: Args, inputs: LossInputs) -> TokenLoss:
    """GSPO-token (equations 13 and 14), with the negative sign: a number for each token.

    ``s_{i,t} = sg[s_i] pi(y_t) / sg[pi(y_t)]`` has the value of the row's ratio and the gradient of the token alone
    (``sg``: without a gradient; section 4.3), so that advantages may differ within a row. With one advantage a row and
    ``--loss-agg-mode seq-mean-token-mean``, as the paper averages, it equals ``gspo`` in value and gradient.

    Metrics, means over tokens: ``sequence_clipfrac``, ``ppo_kl``.
    """
    log_ratio_bt = inputs.log_probs - inputs.old_log_probs
    log_ratio_b = row_mean(log_ratio_bt, inputs.loss_mask).detach()
    log_s_bt = log_ratio_b[:, None] + (inputs.log_probs - inputs.log_probs.detach())
    values_bt, clipped_bt = clipped_surrogate(args, inputs.advantages, ratio_of(log_s_bt))
    return TokenLoss(values_bt, metrics={"sequence_clipfrac": clipped_bt, "ppo_kl": -log_ratio_bt})


@loss_unit(Unit.TOKEN)
def cispo(args: Args, inputs: LossInputs) -> TokenLoss:
    """CISPO: the policy gradient with clipped importance weights (MiniMax-M1, arXiv 2506.13585, section 3.1). Equations
    4 and 5, with the negative sign: ``-sg[clip(r, 1 - eps_clip, 1 + eps_clip_high)] A log pi`` for each token,
    ``[num_rows, max_response]``; ``sg``: without a gradient.

    PPO gives a clipped token no gradient; here the weight is clipped and the gradient stays. The paper has no lower
    bound (``--eps-clip 1``) and averages over tokens (``--loss-agg-mode token-mean``). The number itself is no
    estimate of anything: only its gradient is meant.

    Metrics, means over tokens: ``cispo_clipfrac``; ``ppo_kl`` (k1 estimate of KL(old || new)).
    """
    low, high = clip_range(args)
    log_ratio_bt = (inputs.log_probs - inputs.old_log_probs).detach()
    ratio_bt = ratio_of(log_ratio_bt)
    weight_bt = ratio_bt.clamp(1 - low, 1 + high)
    return TokenLoss(
        -weight_bt * inputs.advantages * inputs.log_probs,
        metrics={"cispo_clipfrac": weight_bt != ratio_bt, "ppo_kl": -log_ratio_bt},
    )


@loss_unit(Unit.ROW)
def gmpo(args: Args, inputs: LossInputs) -> TokenLoss:
    """GMPO: the geometric mean of a row's clipped ratios in place of their arithmetic mean (arXiv 2507.20673).
    ``-A (prod_t c_t)^(1 / length)`` for each row ``[num_rows]``, with the negative sign, a mean over samples whatever
    ``--loss-agg-mode`` says; ``c_t`` is the ratio of a token, clipped on the side where its advantage pulls, as the
    minimum in PPO's surrogate does.

    Clipping is of log-ratios, in nats: the range is ``[e^-eps_clip, e^eps_clip_high]``; the paper has 0.4 for both
    (``--eps-clip 0.4``). Where the two differ, a negative advantage is bounded by ``e^-eps_clip`` as in verl; the
    paper's exponent ``sgn A`` makes it ``e^-eps_clip_high``. GSPO clips the mean; here each token is clipped before it.
    The advantage of a row is the mean over its tokens, of which GRPO's are all equal.

    Metrics: ``pg_clipfrac``, ``ppo_kl``: means over tokens.
    """
    low, high = clip_range(args)
    advantages_b = row_mean(inputs.advantages, inputs.loss_mask)
    log_ratio_bt = inputs.log_probs - inputs.old_log_probs
    rises = (advantages_b > 0)[:, None]
    clipped_bt = log_ratio_bt.clamp(max=high).where(rises, log_ratio_bt.clamp(min=-low))
    ratio_b = ratio_of(row_mean(clipped_bt, inputs.loss_mask))
    metrics = {"pg_clipfrac": clipped_bt != log_ratio_bt, "ppo_kl": -log_ratio_bt}
    return TokenLoss(-advantages_b * ratio_b, metrics=metrics)


@loss_unit(Unit.TOKEN)
def sapo(args: Args, inputs: LossInputs) -> TokenLoss:
    """SAPO: a soft gate on each token's ratio in place of clipping (arXiv 2511.20347). ``-A f(r)`` for each token
    ``[num_rows, max_response]``, with ``f(r) = 4 / tau x sigmoid(tau (r - 1))`` and ``tau`` of the sign of the
    advantage: ``--sapo-tau-pos``, or ``--sapo-tau-neg`` (zero included).

    The slope of ``f`` is 1 at ``r = 1``, as without a gate, and falls smoothly to 0 on both sides: faster for a larger
    ``tau``. A larger one for negative advantages damps what raises the probability of tokens that were not sampled.
    The paper averages over a sample's tokens, then over samples (``--loss-agg-mode seq-mean-token-mean``).

    Metrics, means over tokens: ``sapo_gate``, the slope of ``f`` at the ratio; ``ppo_kl``.
    """
    import torch

    log_ratio_bt = inputs.log_probs - inputs.old_log_probs
    tau_bt = torch.where(inputs.advantages > 0, args.sapo_tau_pos, args.sapo_tau_neg)
    open_bt = (tau_bt * (ratio_of(log_ratio_bt) - 1)).sigmoid()
    metrics = {"sapo_gate": 4 * open_bt * (1 - open_bt), "ppo_kl": -log_ratio_bt}
    return TokenLoss(-inputs.advantages * 4 / tau_bt * open_bt, metrics=metrics)


@loss_unit(Unit.TOKEN, needs=("rollout_log_probs",))
def decoupled_ppo(args: Args, inputs: LossInputs) -> TokenLoss:
    """Decoupled PPO: the policy that sampled a token is not the one that the update stays close to (AReaL, arXiv
    2505.24298, section 5.2; J. Hilton et al., arXiv 2110.00641).

    ``w max(-A r, -A clip(r))`` for each token ``[num_rows, max_response]``, with three policies: ``r = pi / pi_prox``
    is clipped as PPO's ratio is; ``w = pi_prox / pi_behave`` is the importance weight of the engine's token, without a
    gradient.

    Log-probabilities of ``pi_behave`` are the column ``rollout_log_probs``; of ``pi_prox`` the column
    ``prox_log_probs``, or the trainer's ``old_log_probs`` where there is none. ``--use-rollout-logprobs`` makes the old
    policy the engine's, so it needs ``prox_log_probs``. ``w`` is at most ``--decoupled-behave-cap``: cut off there
    (``--decoupled-behave-mode clamp``), or 0 above it (``mask``); a masked token stays in the divisor. The cap is of
    AReaL's code, not of its paper's equation 5.

    Metrics, means over tokens: ``pg_clipfrac``; ``ppo_kl``, from proximal to new policy; ``behave_weight`` before the
    cap; ``behave_capped``.
    """
    import torch

    prox_bt = inputs["prox_log_probs"] if args.use_rollout_logprobs else inputs.get("prox_log_probs")
    prox_bt = inputs.old_log_probs if prox_bt is None else prox_bt
    log_ratio_bt = inputs.log_probs - prox_bt
    values_bt, clipped_bt = clipped_surrogate(args, inputs.advantages, ratio_of(log_ratio_bt))
    weight_bt = ratio_of(prox_bt - inputs.rollout_log_probs)
    capped_bt, used_bt = torch.zeros_like(weight_bt), weight_bt
    if (cap := args.decoupled_behave_cap) is not None:
        capped_bt = weight_bt > cap
        used_bt = torch.where(capped_bt, cap if args.decoupled_behave_mode == "clamp" else 0.0, weight_bt)
    metrics = {"pg_clipfrac": clipped_bt, "ppo_kl": -log_ratio_bt}
    return TokenLoss(used_bt * values_bt, metrics={**metrics, "behave_weight": weight_bt, "behave_capped": capped_bt})


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
