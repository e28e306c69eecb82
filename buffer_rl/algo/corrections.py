"""Corrections for the difference between engine and trainer: importance weights for tokens that one policy sampled and
another trains.

The engine samples tokens with its own kernels and, under asynchrony, older weights: its probability ``mu`` of a token
differs from the trainer's ``pi_old`` that the ratio of the loss starts from. ``w = pi_old / mu`` is the importance
weight of a token. Values of a policy loss are multiplied by the weights, without a gradient; the divisor of the step
stays as it is, so a rejected token (weight 0) still counts in it, as in IcePop (arXiv 2510.18855). KL penalty and
entropy bonus are not multiplied. Suffix legend: ``_bt`` is ``[num_rows, max_response]``.
"""

from __future__ import annotations

import torch

from buffer_rl.algo.aggregation import per_row
from buffer_rl.algo.losses import ratio_of
from buffer_rl.args import Args
from buffer_rl.kinds.marks import Unit
from buffer_rl.kinds.token_loss import LossInputs, Metric

TOKEN_MODES = ("truncate", "token")
"""Values of ``--tis-mode`` that look at a token by itself; the others look at all tokens of a row."""


def log_weights(inputs: LossInputs) -> torch.Tensor:
    """``log w`` of each token in nats. Raises TrainError without the engine's log-probabilities."""
    found: torch.Tensor = inputs.old_log_probs - inputs.rollout_log_probs
    return found


def truncated_weights(args: Args, inputs: LossInputs) -> torch.Tensor:
    """The weights ``[num_rows, max_response]`` by ``--tis-mode``, with the bounds ``--tis-clip-low`` and
    ``--tis-clip``:

    - ``truncate``: ``w`` clamped to the bounds (truncated importance sampling, F. Yao et al., "Your Efficient RL
      Framework Secretly Brings You Off-Policy RL Training", fengyao.notion.site/off-policy-rl, which has no lower one).
    - ``token``: ``w`` where it is within the bounds, else 0 (IcePop, whose bounds are 0.5 and 5).
    - ``sequence``: each token of a row has the row's weight, the product of its tokens' ``w``; 0 outside the bounds.
    - ``geometric``: 1 where the geometric mean of the row's ``w`` is within the bounds, else 0. A gate alone: a
      geometric mean is no importance weight.

    Each part of a sample that fanned out is a row of its own.
    """
    low, high = args.tis_clip_low, args.tis_clip
    log_weight_bt = log_weights(inputs)
    if args.tis_mode == "truncate":
        return ratio_of(log_weight_bt).clamp(low, high)
    if args.tis_mode == "token":
        gate_bt = ratio_of(log_weight_bt)
    else:
        mode = "seq-mean-token-sum" if args.tis_mode == "sequence" else "seq-mean-token-mean"
        gate_bt = ratio_of(per_row(log_weight_bt, inputs.loss_mask, mode))[:, None].expand_as(log_weight_bt)
    weight_bt = torch.ones_like(gate_bt) if args.tis_mode == "geometric" else gate_bt
    return torch.where((gate_bt >= low) & (gate_bt <= high), weight_bt, 0.0)


def correction_unit(args: Args) -> Unit:
    """What the built-in correction must see together."""
    return Unit.TOKEN if args.tis_mode in TOKEN_MODES else Unit.ROW


def mismatch_metrics(inputs: LossInputs, weights_bt: torch.Tensor) -> dict[str, Metric]:
    """How far the engine's policy is from the trainer's, means over tokens of the untruncated ``w``.

    ``mismatch/k3_kl``: ``w - 1 - log w``, an estimate of KL(engine || trainer) in nats. ``mismatch/weight``: ``w``,
    whose expectation is 1. ``mismatch/chi2``: ``w^2 - 1``, the chi-squared divergence. ``mismatch/rejected``: the share
    of tokens whose weight of ``weights_bt`` is 0. ``Sums.means`` adds ``mismatch/ess``: ``(mean w)^2 / mean w^2``, the
    effective sample size as a share of the tokens.
    """
    log_weight_bt = log_weights(inputs)
    weight_bt = ratio_of(log_weight_bt)
    numbers = {
        "k3_kl": weight_bt - 1 - log_weight_bt,
        "weight": weight_bt,
        "chi2": weight_bt.square() - 1,
        "rejected": weights_bt == 0,
    }
    return {f"mismatch/{name}": Metric(values) for name, values in numbers.items()}
