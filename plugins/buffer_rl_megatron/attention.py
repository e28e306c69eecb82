"""Causal attention of a micro-batch's rows for ``--transformer-impl local``, packed one after another or padded.

Megatron's own local attention takes no packed rows.

Rows may be split over context-parallel ranks. Of a row in ``2n`` chunks of equal length, rank ``r`` of ``n`` has the
chunks ``r`` and ``2n - 1 - r``, which makes causal attention equally much work for all (Llama 3, arXiv:2407.21783,
section 3.3.2). TransformerEngine's attention and Megatron's rotary embeddings expect this order. A rank gathers the
keys and values of all before it attends.

Suffix legend: ``_t`` is ``[num_tokens]``, all rows one after another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.bias import causal_lower_right

from buffer_rl.errors import ConfigError, TrainError
from buffer_rl.trainer.packing import similar_rows


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


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of packed rows, and how ``CausalAttention`` lays them out: in blocks of similar lengths.

    blocks: of each block its rows, and the places of its queries ``[num_rows * num_queries]`` and keys
        ``[num_rows * num_keys]`` int64: among the tokens of this rank, and among those of all context-parallel ranks.
        The last query of a row is at its last key.
    output_t: int64, of each token of this rank its place in the outputs of all blocks, one after another.
    """

    blocks: tuple[tuple[int, torch.Tensor, torch.Tensor], ...] = ()
    output_t: torch.Tensor | None = None


def packed_rows(share: Share, device: torch.device, *, blockwise: bool = True) -> PackedRows:
    """The rows of ``share``, of at least one token each. blockwise: for ``CausalAttention``."""
    lengths = share.lengths
    starts = np.cumsum(lengths) - lengths
    own_t = share.place_t % share.own.size
    blocks, offset = [], 0
    output_t = np.zeros(share.own.size, dtype=np.int64)
    chunks = chunks_of(share.size, share.rank)
    for rows in similar_rows(lengths, equal=share.size > 1) if blockwise else ():
        step = np.arange(int(lengths[rows[0]]))
        real = step < lengths[rows][:, None]
        tokens = np.where(real, starts[rows][:, None] + step, 0)
        width = len(step) // (len(chunks) * share.size)
        for chunk in chunks:
            begin, end = chunk * width, (chunk + 1) * width
            queries, is_query = own_t[tokens[:, begin:end]], real[:, begin:end]
            output_t[queries[is_query]] = (offset + np.arange(queries.size).reshape(queries.shape))[is_query]
            places = (queries, share.place_t[tokens[:, :end]])
            query_places, key_places = (torch.from_numpy(each.reshape(-1)).to(device) for each in places)
            blocks.append((len(rows), query_places, key_places))
            offset += queries.size
    ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
    longest = int(lengths.max())
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        blocks=tuple(blocks),
        output_t=torch.from_numpy(output_t).to(device) if blockwise else None,
    )


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Takes the place of Megatron's ``DotProductAttention``: each token attends to its row up to itself. Raises
    ConfigError for dropout and windows, TrainError for a mask or a bias, which it does not apply."""

    def __init__(
        self, config: Any, *_: Any, softmax_scale: float | None = None, pg_collection: Any = None, **__: Any
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout or getattr(config, "window_size", None):
            what = f"attention with dropout {config.attention_dropout} and window {config.window_size}"
            raise ConfigError(what, where="--transformer-impl local", expected="no dropout, and all earlier tokens")
        self._context = None if pg_collection is None else pg_collection.cp
        self._scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Of packed rows ``[num_tokens, num_heads, head_dim]`` to ``[num_tokens, num_heads * head_dim]``; of padded
        ones ``[length, num_rows, num_heads, head_dim]`` to ``[length, num_rows, num_heads * head_dim]``."""
        if attention_mask is not None or attention_bias is not None:
            what = "attention got a mask, which would be ignored"
            raise TrainError(what, expected="causal rows, packed or padded on the right")
        rank, size = (self._context.rank(), self._context.size()) if self._context is not None else (0, 1)
        if size > 1:  # in one message
            states = gather_states(torch.cat([key, value], -1), self._context)
            key, value = states[..., : key.shape[-1]], states[..., key.shape[-1] :]
        if packed_seq_params is None:
            chunks, outputs = chunks_of(size, rank), []
            key, value = in_order(key, size), in_order(value, size)
            for own, chunk in zip(query.chunk(len(chunks)), chunks, strict=True):
                end = (chunk + 1) * len(own)
                rows = (states.permute(1, 2, 0, 3) for states in (own, key[:end], value[:end]))
                outputs.append(self._causal(*rows).permute(2, 0, 1, 3).flatten(2))
            return torch.cat(outputs)
        if not isinstance(packed_seq_params, PackedRows) or packed_seq_params.output_t is None:
            raise TrainError("packed rows come without their blocks", expected="packed_rows(share, device)")
        outputs = []
        for num_rows, queries, keys in packed_seq_params.blocks:
            rows = (
                states.index_select(0, tokens).view(num_rows, -1, *states.shape[1:]).transpose(1, 2)
                for states, tokens in ((query, queries), (key, keys), (value, keys))
            )
            outputs.append(self._causal(*rows).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, packed_seq_params.output_t).flatten(1)

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``[num_rows, num_heads, length, head_dim]``; keys and values of fewer heads are shared. Where there are fewer
        queries than keys, they are the last ones."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        how: dict[str, Any] = {"is_causal": True}
        if num_queries < num_keys:
            how = {"attn_mask": causal_lower_right(num_queries, num_keys)}
        shared = query.shape[1] != key.shape[1]
        if shared and query.is_cuda and query.dtype == torch.float32:
            # Of the kernels that keep no scores only those for halves take shared heads (torch 2.13).
            copies = query.shape[1] // key.shape[1]
            key, value, shared = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1), False
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=self._scale, enable_gqa=shared, **how
        )
