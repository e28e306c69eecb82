"""How token losses become one number, as shares that add up over micro-batches and ranks.

Suffix legend: ``_bt`` is ``[num_rows, max_response]``; torch float32.
"""

from __future__ import annotations

import torch

from buffer_rl.contracts import LossInputs
from buffer_rl.errors import ConfigError


def mask_out(values_bt: torch.Tensor, mask_bt: torch.Tensor) -> torch.Tensor:
    """``values x mask``, where a masked value may even be infinite or NaN (``inf x 0`` would be NaN)."""
    return torch.where(mask_bt != 0, values_bt, 0.0) * mask_bt


def aggregate(values_bt: torch.Tensor, inputs: LossInputs, mode: str) -> torch.Tensor:
    """This micro-batch's share (scalar) of the aggregate of ``values_bt`` over the whole step.

    ``token-mean``: the mean over all unmasked tokens of the step (DAPO, arXiv 2503.14476, section 3.3).
    ``seq-mean-token-mean``: each sample's mean over its unmasked tokens, then the mean over samples (DeepSeekMath,
    arXiv 2402.03300, equation 3).
    ``seq-mean-token-sum``: each sample's sum, then the mean over samples (Dr. GRPO, arXiv 2503.20783, section 3.1, up
    to a constant factor).
    A sample is all its parts: one that fanned out into several rows weighs as much as one that did not, wherever its
    rows are. One that is masked entirely contributes 0 and still counts as a sample.

    Of ``inputs`` it reads ``loss_mask``, ``total_samples``, ``total_tokens`` (infinity gives 0) and
    ``sample_total_tokens``. Raises ConfigError for another mode.
    """
    masked_bt = mask_out(values_bt, inputs.loss_mask)
    if mode == "token-mean":
        return masked_bt.sum() / max(inputs.total_tokens, 1)
    if mode == "seq-mean-token-mean":
        means: torch.Tensor = masked_bt.sum(-1) / inputs.sample_total_tokens.clamp(min=1)
        return means.sum() / max(inputs.total_samples, 1)
    if mode == "seq-mean-token-sum":
        return masked_bt.sum() / max(inputs.total_samples, 1)
    raise ConfigError(
        f"there is no aggregation {mode!r}",
        where="--loss-agg-mode",
        expected="token-mean, seq-mean-token-mean or seq-mean-token-sum",
    )
