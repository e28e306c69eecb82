"""Log-probabilities and entropies of tokens from logits, some tokens at a time.

Suffix legend: ``_n`` is ``[num_tokens]``; ``_nv`` is ``[num_tokens, vocabulary]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 24
"""Logits that are worked on at a time: 64 MiB of float32, and up to four times as much while it lasts."""
ON_A_GPU = 4
"""A GPU takes so many times as much: a step of 0.6 billion parameters then takes 0.50 s in place of 0.61 (H100)."""


def chunk_size(vocabulary: int, device: torch.device) -> int:
    """Tokens that are worked on at a time. It does not depend on the rows of a micro-batch."""
    elements = CHUNK_ELEMENTS * (ON_A_GPU if device.type == "cuda" else 1)
    return max(1, elements // max(1, vocabulary))


def chunks(size: int, kept: Sequence[torch.Tensor], *values: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """``values``, of tokens each, and ``kept`` (see ``MicroBatch``), ``size`` tokens at a time; once without tokens."""
    parts = [_split(each, size) for each in values]
    if kept:
        counts_n, ids = kept
        counts = _split(counts_n, size)
        parts += [counts, _split(ids, [int(count_c.sum()) for count_c in counts])]
    return zip(*parts, strict=True)


def _split(values_n: torch.Tensor, sizes: int | list[int]) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = values_n.split(sizes)  # type: ignore[no-untyped-call]
    return parts


def in_chunks(
    of_logits: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    logits_nv: torch.Tensor,
    target_n: torch.Tensor,
    kept: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``of_logits(logits_nv, target_n, *kept)``, which is ``(log_probs_n, entropy_n)``, some tokens at a time, and
    again in the backward pass. kept: as in ``MicroBatch``."""
    size = chunk_size(logits_nv.shape[-1], logits_nv.device)
    parts = [
        # A single one would gain nothing from being computed twice.
        of_logits(*chunk)
        if len(logits_nv) <= size
        else checkpoint(of_logits, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks(size, kept, logits_nv, target_n)
    ]
    log_probs_n, entropy_n = (torch.cat(values) for values in zip(*parts, strict=True))
    return log_probs_n, entropy_n


def of_logits(
    temperature: float, with_entropy: bool, logits_nv: torch.Tensor, target_n: torch.Tensor, *kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of some tokens, ``[num_tokens]`` float32 each. kept: as in ``MicroBatch``."""
    logits_nv = logits_nv.float()
    if temperature != 1.0:
        logits_nv = logits_nv / temperature
    if kept:
        logits_nv = only_kept(logits_nv, *kept)
    all_log_probs_nv = torch.log_softmax(logits_nv, dim=-1)
    log_probs_n = all_log_probs_nv.gather(-1, target_n[:, None]).squeeze(-1)
    entropy_n = torch.zeros_like(log_probs_n)
    if with_entropy:
        entropy_n = _Entropy.apply(all_log_probs_nv)  # type: ignore[no-untyped-call]
    return log_probs_n, entropy_n


def only_kept(logits_nv: torch.Tensor, counts_n: torch.Tensor, kept: torch.Tensor, *, first: int = 0) -> torch.Tensor:
    """The logits, -inf for the tokens that top-k, top-p and min-p cut off when the engine sampled (see
    ``MicroBatch``). first: the first token of the part of the vocabulary that the logits are of."""
    return logits_nv.masked_fill(cut_off(logits_nv, counts_n, kept, first=first), float("-inf"))


def cut_off(like_nv: torch.Tensor, counts_n: torch.Tensor, kept: torch.Tensor, *, first: int = 0) -> torch.Tensor:
    """Whether a token was cut off, as ``only_kept`` says: ``[num_tokens, vocabulary]`` bool, on the device of
    ``like_nv`` and in its shape."""
    cut_nv = (counts_n > 0)[:, None].expand(like_nv.shape).clone()
    rows = torch.repeat_interleave(torch.arange(len(counts_n), device=counts_n.device), counts_n)
    own = (kept >= first) & (kept < first + like_nv.shape[1])
    cut_nv[rows[own], kept[own] - first] = False
    return cut_nv


class _Entropy(torch.autograd.Function):
    """``-sum(p log p)`` over the vocabulary, in nats. Its backward pass needs the log-probabilities alone, which
    ``log_softmax`` keeps anyway: a loss that does not use the entropy pays no memory for its gradient."""

    @staticmethod
    def forward(ctx: Any, log_probs_nv: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, vocabulary]`` to ``[num_tokens]``."""
        ctx.save_for_backward(log_probs_nv)
        return entropy_of(log_probs_nv)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        """See ``entropy_slope``."""
        (log_probs_nv,) = ctx.saved_tensors
        return entropy_slope(log_probs_nv, gradients[0])


def entropy_of(
    log_probs_nv: torch.Tensor, *, probs: torch.Tensor | None = None, finite: torch.Tensor | None = None
) -> torch.Tensor:
    """``-sum(p log p)`` over the vocabulary, in nats. probs, finite: memory of the size of ``log_probs_nv`` to work in;
    ``finite`` may be that tensor itself."""
    terms_nv = torch.exp(log_probs_nv, out=probs)
    terms_nv.mul_(finite_log_probs(log_probs_nv, out=finite))
    entropy_n: torch.Tensor = -terms_nv.sum(-1)
    return entropy_n


def entropy_slope(
    log_probs_nv: torch.Tensor,
    of_entropy: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    finite: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient in the log-probabilities as if each stood alone, ``d(-p log p) / d(log p) = -p (log p + 1)``, times
    that of the entropies ``[num_tokens]``. probs: memory for the result; finite: to work in."""
    slope_nv = torch.exp(log_probs_nv, out=probs).neg_()
    return slope_nv.mul_(finite_log_probs(log_probs_nv, out=finite).add_(1)).mul_(of_entropy[:, None])


def finite_log_probs(log_probs_nv: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """A token of probability 0 contributes 0, the limit of p log p, where its log is -inf. out: memory for the result;
    if it is not given, a new tensor."""
    return torch.clamp(log_probs_nv, min=torch.finfo(log_probs_nv.dtype).min, out=out)
