"""GSPO: ratios and clipping of whole sequences in place of tokens (arXiv 2507.18071).

The ratio of a row is the geometric mean of its tokens' ratios (equation 7), ``s_i = exp(mean_t log r_t)``. It is far
closer to 1 than tokens' ratios are: the paper clips at 3e-4 and 4e-4 (``--eps-clip 3e-4 --eps-clip-high 4e-4``). Each
part of a sample that fanned out has a ratio of its own. Suffix legend: ``_bt`` is ``[num_rows, max_response]``, ``_b``
is ``[num_rows]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer_rl.algo.aggregation import row_mean
from buffer_rl.algo.losses import clipped_surrogate, ratio_of
from buffer_rl.kinds.marks import Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, TokenLoss

if TYPE_CHECKING:
    from buffer_rl.args import Args


@loss_unit(Unit.ROW)
def gspo(args: Args, inputs: LossInputs) -> TokenLoss:
    """Equation 5, with the negative sign: a number for each row ``[num_rows]``, a mean over samples whatever
    ``--loss-agg-mode`` says.

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
