"""SAPO: a soft gate on each token's ratio in place of clipping (arXiv 2511.20347)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer_rl.algo.losses import ratio_of
from buffer_rl.kinds.marks import Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, TokenLoss

if TYPE_CHECKING:
    from buffer_rl.args import Args


@loss_unit(Unit.TOKEN)
def sapo(args: Args, inputs: LossInputs) -> TokenLoss:
    """``-A f(r)`` for each token ``[num_rows, max_response]``, with ``f(r) = 4 / tau x sigmoid(tau (r - 1))`` and
    ``tau`` of the sign of the advantage: ``--sapo-tau-pos``, or ``--sapo-tau-neg`` (zero included).

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
