"""CISPO: the policy gradient with clipped importance weights (MiniMax-M1, arXiv 2506.13585, section 3.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer_rl.algo.losses import clip_range, ratio_of
from buffer_rl.kinds.marks import Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, TokenLoss

if TYPE_CHECKING:
    from buffer_rl.args import Args


@loss_unit(Unit.TOKEN)
def cispo(args: Args, inputs: LossInputs) -> TokenLoss:
    """Equations 4 and 5, with the negative sign: ``-sg[clip(r, 1 - eps_clip, 1 + eps_clip_high)] A log pi`` for each
    token, ``[num_rows, max_response]``; ``sg``: without a gradient.

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
