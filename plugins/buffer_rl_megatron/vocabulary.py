"""Log-probabilities and entropies of tokens from logits that are split over tensor-parallel ranks by vocabulary.

Suffix legend: ``_n`` is ``[num_tokens]``; ``_nv`` is ``[num_tokens, vocabulary of this rank]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from buffer_rl.trainer.vocabulary import finite_log_probs, in_chunks, only_kept


def log_probs_and_entropies(
    logits_nv: torch.Tensor,
    target_n: torch.Tensor,
    *,
    temperature: float,
    group: Any,
    with_entropy: bool = True,
    kept: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(log_probs_n, entropy_n)`` float32 in nats, equal on all ranks of ``group`` and differentiable in the logits of
    each. Every rank of the group calls it with the same targets.

    logits_nv: this rank's part of the vocabulary, in rank order; all parts are equally large. target_n: int64. kept: as
    in ``buffer_rl.trainer.collate.MicroBatch``; probabilities are renormalised over these tokens. The entropy is 0
    without ``with_entropy``. What is as large as logits is made some tokens at a time, and again in the backward pass.
    """
    return in_chunks(partial(_of_chunk, temperature, group, with_entropy), logits_nv, target_n, kept)


def _of_chunk(
    temperature: float,
    group: Any,
    with_entropy: bool,
    logits_nv: torch.Tensor,
    target_n: torch.Tensor,
    *kept: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_nv = logits_nv.float()
    if temperature != 1.0:
        logits_nv = logits_nv / temperature
    first = dist.get_rank(group) * logits_nv.shape[1]
    if kept:
        logits_nv = only_kept(logits_nv, *kept, first=first)
    log_probs_n, entropy_n = _SplitSoftmax.apply(logits_nv, target_n, first, group, with_entropy)  # type: ignore[no-untyped-call]
    return log_probs_n, entropy_n


class _SplitSoftmax(torch.autograd.Function):
    """Log-probability of each target and entropy of each distribution; three sums over ranks and a maximum forward,
    none backward, as each rank's logits have a gradient of their own:
    ``d log p_t / d z_j = [j = t] - p_j`` and ``d H / d z_j = -p_j (log p_j + H)``."""

    @staticmethod
    def forward(
        ctx: Any, logits_nv: torch.Tensor, target_n: torch.Tensor, first: int, group: Any, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        greatest_n = _over_ranks(logits_nv.max(-1).values, group, dist.ReduceOp.MAX)
        shifted_nv = logits_nv - greatest_n[:, None]
        log_probs_nv = shifted_nv - _over_ranks(shifted_nv.exp().sum(-1), group).log()[:, None]
        own_n = target_n - first
        is_own_n = (own_n >= 0) & (own_n < logits_nv.shape[1])
        own_n = torch.where(is_own_n, own_n, 0)
        found_n = log_probs_nv.gather(-1, own_n[:, None]).squeeze(-1)
        log_probs_n = _over_ranks(torch.where(is_own_n, found_n, 0.0), group)
        entropy_n = torch.zeros_like(log_probs_n)
        if with_entropy:
            entropy_n = _over_ranks(-(log_probs_nv.exp() * finite_log_probs(log_probs_nv)).sum(-1), group)
        ctx.save_for_backward(log_probs_nv, own_n, is_own_n, entropy_n)
        ctx.with_entropy = with_entropy
        ctx.set_materialize_grads(False)
        return log_probs_n, entropy_n

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        log_probs_nv, own_n, is_own_n, entropy_n = ctx.saved_tensors
        of_log_probs, of_entropy = gradients
        probs_nv = log_probs_nv.exp()
        slope_nv = torch.zeros_like(log_probs_nv)
        if of_log_probs is not None:
            slope_nv -= probs_nv * of_log_probs[:, None]
            slope_nv.scatter_add_(-1, own_n[:, None], torch.where(is_own_n, of_log_probs, 0.0)[:, None])
        if of_entropy is not None and ctx.with_entropy:
            slope_nv -= probs_nv * (finite_log_probs(log_probs_nv) + entropy_n[:, None]) * of_entropy[:, None]
        return slope_nv, None, None, None, None


def _over_ranks(values_n: torch.Tensor, group: Any, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values_n, op=operation, group=group)
    return values_n
