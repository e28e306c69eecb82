"""How token losses become one number, as shares that add up over micro-batches and ranks.

Suffix legend: ``_bt`` is ``[num_rows, max_response]``, ``_b`` is ``[num_rows]``; torch float32.
"""

from __future__ import annotations

import torch

from buffer_rl.errors import ConfigError


def mask_out(values_bt: torch.Tensor, mask_bt: torch.Tensor) -> torch.Tensor:
    """``values x mask``, where a masked value may even be infinite or NaN (``inf x 0`` would be NaN)."""
    return torch.where(mask_bt != 0, values_bt, 0.0) * mask_bt


def aggregate(
    values_bt: torch.Tensor, mask_bt: torch.Tensor, mode: str, total_rows: float, total_tokens: float
) -> torch.Tensor:
    """This micro-batch's share (scalar) of the aggregate over the whole step.

    ``token-mean``: the mean over all unmasked tokens of the step (DAPO, arXiv 2503.14476, section 3.3).
    ``seq-mean-token-mean``: each row's mean over its unmasked tokens, then the mean over rows (DeepSeekMath, arXiv
    2402.03300, equation 3). A row that is masked entirely contributes 0 and still counts as a row.
    ``seq-mean-token-sum``: each row's sum, then the mean over rows (Dr. GRPO, arXiv 2503.20783, section 3.1, up to
    a constant factor).

    total_rows, total_tokens: rows and unmasked response tokens of the whole step over all ranks; infinity gives 0.
    Raises ConfigError for another mode.
    """
    masked_bt = mask_out(values_bt, mask_bt)
    if mode == "token-mean":
        return masked_bt.sum() / max(total_tokens, 1)
    if mode == "seq-mean-token-mean":
        return (masked_bt.sum(-1) / mask_bt.sum(-1).clamp(min=1)).sum() / max(total_rows, 1)
    if mode == "seq-mean-token-sum":
        return masked_bt.sum() / max(total_rows, 1)
    raise ConfigError(
        f"there is no aggregation {mode!r}",
        where="--loss-agg-mode",
        expected="token-mean, seq-mean-token-mean or seq-mean-token-sum",
    )
