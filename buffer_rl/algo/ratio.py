"""Probability ratios, their clip range, and the clipped surrogate of PPO, which several losses share."""

from __future__ import annotations

from typing import Any

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this many nats before ``exp`` (e^20 is about 5e8, far from overflow in float32). Where the
clamp acts the gradient is 0; a token that far off carries no usable signal, and one infinity would lose the step."""


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp(log_ratio)``, with the log-ratio in nats clamped to ``MAX_LOG_RATIO``."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clip_range(args: Any) -> tuple[float, float]:
    """The lower and upper width of the clip range: ``--eps-clip`` and ``--eps-clip-high``, which is ``--eps-clip``
    where absent (DAPO, arXiv 2503.14476, section 3.1, has two widths)."""
    return args.eps_clip, args.eps_clip if args.eps_clip_high is None else args.eps_clip_high


def clipped_surrogate(args: Any, advantages: torch.Tensor, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high))`` in the shape of ``ratio`` (PPO, arXiv 1707.06347,
    equation 7, with the negative sign), and where the clip acts.

    With ``eps_clip_c`` a negative advantage costs at most ``eps_clip_c |A|`` (dual clip, arXiv 1912.09729):
    without it the loss of a token whose ratio is large and whose advantage is negative has no bound.
    """
    low, high = clip_range(args)
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    values, acts = torch.maximum(free, clipped), clipped > free
    if args.eps_clip_c is None:
        return values, acts
    ceiling = torch.where(advantages < 0, -advantages * args.eps_clip_c, torch.inf)
    return torch.minimum(values, ceiling), acts | (values > ceiling)
