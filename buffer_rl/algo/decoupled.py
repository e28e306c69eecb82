"""Decoupled PPO: the policy that sampled a token is not the one that the update stays close to (AReaL, arXiv
2505.24298, section 5.2; J. Hilton et al., arXiv 2110.00641)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer_rl.algo.losses import clipped_surrogate, ratio_of
from buffer_rl.kinds.marks import Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, TokenLoss

if TYPE_CHECKING:
    from buffer_rl.args import Args


@loss_unit(Unit.TOKEN, needs=("rollout_log_probs",))
def decoupled_ppo(args: Args, inputs: LossInputs) -> TokenLoss:
    """``w max(-A r, -A clip(r))`` for each token ``[num_rows, max_response]``, with three policies: ``r = pi /
    pi_prox`` is clipped as PPO's ratio is; ``w = pi_prox / pi_behave`` is the importance weight of the engine's token,
    without a gradient.

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
