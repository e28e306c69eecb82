"""GSPO: ratios and clipping of whole sequences in place of tokens (arXiv 2507.18071, section 4.1), as a loss of
one's own. ``--loss-type gspo`` is the same formula built in (``buffer_rl/algo/losses.py``).

    buffer-rl train --config examples/quickstart/train.yaml --num-steps-per-rollout 4 \
        --custom-loss-function-path examples/losses/gspo.py:gspo --eps-clip 3e-4 --eps-clip-high 4e-4
"""

from __future__ import annotations

from typing import Any

import torch

from buffer_rl.kinds.marks import loss_unit
from buffer_rl.kinds.token_loss import LossInputs, TokenLoss


@loss_unit("row")
def gspo(args: Any, inputs: LossInputs) -> TokenLoss:
    """Equation 5, with the negative sign: a number for each row.

    The ratio of a row is the geometric mean of its tokens' ratios (equation 7). Its advantage is the mean over its
    tokens: the group-normalised reward (equation 6), which GRPO gives to every token alike. Each part of a sample that
    fanned out has a ratio of its own.
    """
    mask = inputs.loss_mask
    length = mask.sum(-1).clamp(min=1)
    log_ratio = ((inputs.log_probs - inputs.old_log_probs) * mask).sum(-1) / length
    advantage = (inputs.advantages * mask).sum(-1) / length
    ratio = log_ratio.exp()
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    free = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - args.eps_clip, 1 + high)
    return TokenLoss(torch.maximum(free, clipped), metrics={"sequence_clipfrac": clipped > free, "ppo_kl": -log_ratio})
