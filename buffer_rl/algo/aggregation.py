"""The weights of token losses, the divisor of a step, and the sums of metrics.

A step's loss is ``sum(w x v) / D`` over all its rows. Every row adds to D by itself, so that micro-batches, ranks and
groups that stream add up without knowledge of the rest of the step. Suffix legend: ``_bt`` is
``[num_rows, max_response]``, ``_b`` is ``[num_rows]``; torch float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from buffer_rl.errors import ConfigError
from buffer_rl.kinds.token_loss import NEW_FORM, Metric, Reduction, Total

if TYPE_CHECKING:
    import torch


def __getattr__(name: str) -> object:
    if name == "aggregate":  # of the earlier contract: the module of a loss may still import it
        raise ImportError(f"there is no aggregate any more: {NEW_FORM}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def mask_out(values_bt: torch.Tensor, mask_bt: torch.Tensor) -> torch.Tensor:
    """``values x mask``, where a masked value may even be infinite or NaN (``inf x 0`` would be NaN)."""
    return values_bt.where(mask_bt != 0, 0.0) * mask_bt


def token_weights(
    mode: str, mask_bt: torch.Tensor, sample_tokens_b: torch.Tensor, parts_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights ``[num_rows, max_response]`` of a number for each token, and these rows' share of D (scalar).

    ``token-mean``: the mean over all unmasked tokens of the step (DAPO, arXiv 2503.14476, section 3.3).
    ``seq-mean-token-mean``: each sample's mean over its unmasked tokens, then the mean over samples (DeepSeekMath,
    arXiv 2402.03300, equation 3).
    ``seq-mean-token-sum``: each sample's sum, then the mean over samples (Dr. GRPO, arXiv 2503.20783, section 3.2, up
    to a constant factor).
    A sample is all its parts: one that fanned out into several rows weighs as much as one that did not, wherever its
    rows are. One that is masked entirely contributes 0 and still counts as a sample.

    sample_tokens_b: unmasked response tokens of each row's sample over all its parts. parts_b: rows of that sample.
    Raises ConfigError for another mode.
    """
    if mode == "token-mean":
        import torch

        return mask_bt, mask_bt.sum(dtype=torch.float64)
    samples = (1 / parts_b.double()).sum()
    if mode == "seq-mean-token-mean":
        return mask_bt / sample_tokens_b.clamp(min=1)[:, None], samples
    if mode == "seq-mean-token-sum":
        return mask_bt, samples
    what = f"there is no aggregation {mode!r}"
    raise ConfigError(what, where="--loss-agg-mode", expected="token-mean, seq-mean-token-mean or seq-mean-token-sum")


def row_weights(mask_bt: torch.Tensor, parts_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights ``[num_rows]`` of a number for each row, and these rows' share of D: a mean over samples. A row that
    is masked entirely contributes 0 and still counts."""
    shares_b = 1 / parts_b.double()
    return shares_b.float() * (mask_bt != 0).any(-1), shares_b.sum()


def per_row(values_bt: torch.Tensor, mask_bt: torch.Tensor, mode: str) -> torch.Tensor:
    """A number for each token as one for each row ``[num_rows]``: the sum over its unmasked tokens under
    ``seq-mean-token-sum``, else their mean."""
    return mask_out(values_bt, mask_bt).sum(-1) if mode == "seq-mean-token-sum" else row_mean(values_bt, mask_bt)


def row_mean(values_bt: torch.Tensor, mask_bt: torch.Tensor) -> torch.Tensor:
    """The mean over each row's unmasked tokens ``[num_rows]``; 0 for a row without any."""
    return mask_out(values_bt, mask_bt).sum(-1) / mask_bt.sum(-1).clamp(min=1)


def metric_totals(
    metrics: Mapping[str, Any], weights: torch.Tensor, mask_bt: torch.Tensor, parts_b: torch.Tensor
) -> dict[str, Total]:
    """The sums of all metrics; means over tokens, which are most of them, in one operation."""
    import torch

    given = {name: m if isinstance(m, Metric) else Metric(m) for name, m in metrics.items()}
    token_means = [name for name, m in given.items() if Reduction(m.reduction) is Reduction.MEAN and m.values.ndim == 2]
    stacked = torch.stack([given[name].values.detach().float() for name in token_means])
    sums = mask_out(stacked, mask_bt).sum((1, 2), dtype=torch.float64).unbind()
    num_tokens = mask_bt.sum(dtype=torch.float64)
    found = {name: Total(Reduction.MEAN, value, num_tokens) for name, value in zip(token_means, sums, strict=True)}
    for name in given.keys() - found.keys():
        found[name] = _total(given[name], weights, mask_bt, parts_b)
    return {name: found[name] for name in given}


def _total(metric: Metric, weights: torch.Tensor, mask_bt: torch.Tensor, parts_b: torch.Tensor) -> Total:
    import torch

    reduction, values = Reduction(metric.reduction), metric.values.detach().float()
    if reduction is Reduction.LOSS:
        return Total(reduction, mask_out(values, weights).sum(dtype=torch.float64))
    rows_b = (mask_bt != 0).any(-1)
    if reduction is Reduction.MEAN:
        shares_b = rows_b / parts_b.double()
        return Total(reduction, mask_out(values.double(), shares_b).sum(), shares_b.sum())
    chosen = values[mask_bt != 0 if values.ndim == 2 else rows_b]
    largest = reduction is Reduction.MAX
    empty = -torch.inf if largest else torch.inf
    extreme = (chosen.max() if largest else chosen.min()) if chosen.numel() else empty
    return Total(reduction, extreme, chosen.numel())
