"""Losses as formulas: a number for each response token, which the framework masks, weighs, sums and divides.

Suffix legend: ``_bt`` is ``[num_rows, max_response]``; torch float32; log-probabilities and entropies in nats.
"""

from __future__ import annotations

from typing import Any

from buffer_rl.algo.ratio import clipped_surrogate, ratio_of
from buffer_rl.contracts import LossInputs, TokenLoss
from buffer_rl.scope import Unit, loss_unit
from buffer_rl.token_loss import Metric, Reduction


@loss_unit(Unit.TOKEN)
def policy_loss(args: Any, inputs: LossInputs) -> TokenLoss:
    """The clipped surrogate of PPO (arXiv 1707.06347, equation 7), with the negative sign.

    The ratio of new to old probability is clipped to ``[1 - eps_clip, 1 + eps_clip_high]``; the bounds may differ
    (DAPO, arXiv 2503.14476, section 3.1). With ``eps_clip_c`` the loss of a token of negative advantage is at most
    ``eps_clip_c |A|`` (dual clip, arXiv 1912.09729).

    Metrics: ``pg_loss``, weighed as the loss is; ``pg_clipfrac`` and ``ppo_kl`` (k1 estimate of KL(old || new)), means
    over tokens.

    Raises TrainError if there are no advantages, or no log-probabilities that the options name as the old ones.
    """
    log_ratio_bt = inputs.log_probs - inputs.old_log_probs
    values_bt, clipped_bt = clipped_surrogate(args, inputs.advantages, ratio_of(log_ratio_bt))
    return TokenLoss(
        values_bt,
        metrics={
            "pg_loss": Metric(values_bt, Reduction.LOSS),
            "pg_clipfrac": clipped_bt,
            "ppo_kl": -log_ratio_bt,
        },
    )


@loss_unit(Unit.TOKEN)
def sft_loss(args: Any, inputs: LossInputs) -> TokenLoss:
    """The negative log-likelihood of each response token."""
    return TokenLoss(-inputs.log_probs)
