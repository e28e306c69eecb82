"""GMPO: the geometric mean of a row's clipped ratios in place of their arithmetic mean (arXiv 2507.20673)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer_rl.algo.aggregation import row_mean
from buffer_rl.algo.losses import clip_range, ratio_of
from buffer_rl.kinds.marks import Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, TokenLoss

if TYPE_CHECKING:
    from buffer_rl.args import Args


@loss_unit(Unit.ROW)
def gmpo(args: Args, inputs: LossInputs) -> TokenLoss:
    """``-A (prod_t c_t)^(1 / length)`` for each row ``[num_rows]``, with the negative sign, a mean over samples
    whatever ``--loss-agg-mode`` says; ``c_t`` is the ratio of a token, clipped on the side where its advantage
    pulls, as the minimum in PPO's surrogate does.

    Clipping is of log-ratios, in nats: the range is ``[e^-eps_clip, e^eps_clip_high]``; the paper has 0.4 for both
    (``--eps-clip 0.4``). Where the two differ, a negative advantage is bounded by ``e^-eps_clip`` as in verl; the
    paper's exponent ``sgn A`` makes it ``e^-eps_clip_high``. GSPO clips the mean; here each token is clipped before it.
    The advantage of a row is the mean over its tokens, of which GRPO's are all equal. Each part of a sample that fanned
    out is a row of its own.

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
