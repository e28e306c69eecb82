"""Rows that are split over context-parallel ranks: which tokens a rank has, and keys and values of the others.

Of a row in ``2n`` chunks of equal length, rank ``r`` of ``n`` has the chunks ``r`` and ``2n - 1 - r``, which makes
causal attention equally much work for all (Llama 3, arXiv:2407.21783, section 3.3.2). TransformerEngine's attention and
Megatron's rotary embeddings expect this order.

Suffix legend: ``_t`` is ``[num_tokens]``, all rows one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def chunks_of(size: int, rank: int) -> tuple[int, ...]:
    """The chunks of each row that a rank has, in the order in which it has them. One rank has the row in one chunk."""
    return (rank, 2 * size - 1 - rank) if size > 1 else (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Tokens of one of ``size`` ranks. lengths: of the whole rows, ``[num_rows]``. own: int64 ``[num_tokens / size]``,
    of each token that the rank has its place in the rows. place_t: int64, of each token of the rows its place in the
    shares of all ranks, one share after another."""

    size: int
    rank: int
    lengths: np.ndarray
    own: np.ndarray
    place_t: np.ndarray


def share_of(lengths: np.ndarray, size: int = 1, rank: int = 0) -> Share:
    """lengths: tokens of each row, ``[num_rows]``; multiples of ``2 * size`` where there are several ranks."""
    chunks = [list(chunks_of(size, each)) for each in range(size)]
    ends = np.cumsum(lengths)
    rows = [np.arange(*bounds).reshape(len(chunks[0]) * size, -1) for bounds in zip(ends - lengths, ends, strict=True)]
    tokens = np.concatenate([row[chunks].reshape(size, -1) for row in rows], axis=1)
    return Share(size=size, rank=rank, lengths=lengths, own=tokens[rank], place_t=np.argsort(tokens, axis=None))


def gather_states(states: torch.Tensor, group: Any) -> torch.Tensor:
    """The states ``[num_tokens, ...]`` of all ranks, one share after another; the gradient of a rank's states is the
    sum of those that all ranks have for them."""
    gathered: torch.Tensor = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True, group=group)
    return gathered


def in_order(states: torch.Tensor, size: int) -> torch.Tensor:
    """The shares of a single length, ``[length, ...]``, as the whole rows have their tokens."""
    if size == 1:
        return states
    first, second = states.view(size, 2, -1, *states.shape[1:]).unbind(1)
    return torch.cat([first, second.flip(0)]).flatten(0, 1)
