"""Causal attention of a micro-batch's rows for ``--transformer-impl local``, packed one after another or padded.

Megatron's own local attention takes no packed rows. Suffix legend: ``_t`` is ``[num_tokens]``, all rows one after
another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from buffer_rl.errors import ConfigError, TrainError


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of packed rows, and how ``CausalAttention`` lays them out: in blocks of similar lengths.

    blocks: of each block its rows, its longest row, and of each place ``[num_rows * longest]`` int64 its packed token.
    output_t: int64, of each token its place in the outputs of all blocks, one after another.
    """

    blocks: tuple[tuple[int, int, torch.Tensor], ...] = ()
    output_t: torch.Tensor | None = None


def packed_rows(lengths: np.ndarray, device: torch.device) -> PackedRows:
    """lengths: tokens of each row, ``[num_rows]``, at least one each."""
    starts = np.cumsum(lengths) - lengths
    blocks, offset = [], 0
    output_t = np.zeros(int(lengths.sum()), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    while order.size:  # at most a third of a block is padding
        fits = 3 * lengths[order] >= 2 * lengths[order[0]]
        rows, order = order[fits], order[~fits]
        width = int(lengths[rows[0]])
        step = np.arange(width)
        real = step < lengths[rows][:, None]
        tokens = np.where(real, starts[rows][:, None] + step, 0)
        output_t[tokens[real]] = (offset + np.arange(tokens.size).reshape(tokens.shape))[real]
        blocks.append((len(rows), width, torch.from_numpy(tokens.reshape(-1)).to(device)))
        offset += tokens.size
    ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
    longest = int(lengths.max())
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        blocks=tuple(blocks),
        output_t=torch.from_numpy(output_t).to(device),
    )


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Takes the place of Megatron's ``DotProductAttention``: each token attends to its row up to itself. Raises
    ConfigError for dropout and windows, TrainError for a mask or a bias, which it does not apply."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        if config.attention_dropout or getattr(config, "window_size", None):
            raise ConfigError(
                f"attention with dropout {config.attention_dropout} and window {config.window_size}",
                where="--transformer-impl local",
                expected="no dropout, and all earlier tokens",
            )
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
            raise TrainError(
                "attention got a mask, which would be ignored", expected="causal rows, packed or padded on the right"
            )
        if packed_seq_params is None:
            context = self._causal(*(states.permute(1, 2, 0, 3) for states in (query, key, value)))
            return context.permute(2, 0, 1, 3).flatten(2)
        if not isinstance(packed_seq_params, PackedRows) or packed_seq_params.output_t is None:
            raise TrainError("packed rows come without their blocks", expected="packed_rows(lengths, device)")
        outputs = []
        for num_rows, width, tokens in packed_seq_params.blocks:
            blocks = (
                states.index_select(0, tokens).view(num_rows, width, *states.shape[1:]).transpose(1, 2)
                for states in (query, key, value)
            )
            outputs.append(self._causal(*blocks).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, packed_seq_params.output_t).flatten(1)

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``[num_rows, num_heads, length, head_dim]``; keys and values of fewer heads are shared."""
        shared = query.shape[1] != key.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self._scale, enable_gqa=shared
        )
