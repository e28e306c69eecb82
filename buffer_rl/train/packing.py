"""Rows of a micro-batch as one sequence without padding, where the model allows it.

All layers but attention work token by token: they get the tokens of all rows one after another. Attention unpacks them
into ``[num_rows, max_length]``, computes with its causal kernel, and packs the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations import sdpa_attention

PACKED = "sdpa_of_packed_rows"
"""The name of ``attention`` in transformers."""

FULL_ATTENTION = "full_attention"
PROBE_LENGTHS = (5, 1, 3)
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where packed tokens stand in ``[num_rows, max_length]``.

    tokens: ``[num_tokens]`` int64, of each its position in the flattened rows, which are padded on the right."""

    num_rows: int
    max_length: int
    tokens: torch.Tensor

    @property
    def position_ids(self) -> torch.Tensor:
        """``[1, num_tokens]`` int64: of each token its position in its row."""
        return (self.tokens % self.max_length)[None]

    def unpacked(self, states: torch.Tensor) -> torch.Tensor:
        """``[1, num_heads, num_tokens, head_dim]`` to ``[num_rows, num_heads, max_length, head_dim]``, 0 on padding."""
        _, heads, _, width = states.shape
        rows = states.new_zeros(self.num_rows * self.max_length, heads, width)
        rows = rows.index_copy(0, self.tokens, states[0].transpose(0, 1))
        return rows.view(self.num_rows, self.max_length, heads, width).transpose(1, 2)

    def packed(self, states: torch.Tensor) -> torch.Tensor:
        """``[num_rows, max_length, num_heads, head_dim]`` to ``[1, num_tokens, num_heads, head_dim]``."""
        return states.flatten(0, 1).index_select(0, self.tokens)[None]


def packing_of(lengths: Sequence[int], device: torch.device) -> Packing:
    """The packing of rows of these lengths."""
    real_bl = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    tokens = real_bl.flatten().nonzero().squeeze(-1)
    return Packing(num_rows=len(lengths), max_length=max(lengths), tokens=tokens)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of ``packing``'s rows; without it that of transformers."""
    compute: Any = sdpa_attention.sdpa_attention_forward
    if packing is None:
        output, _ = compute(module, query, key, value, attention_mask, **options)
        return output, None
    rows = (packing.unpacked(states) for states in (query, key, value))
    output, _ = compute(module, *rows, None, **options)
    return packing.packed(output), None


def is_packed(model: torch.nn.Module) -> bool:
    """Whether the model takes packed rows: ``model(input_ids, position_ids, packing=...)``."""
    return isinstance(model, PreTrainedModel) and _implementation(model) == PACKED


def pack_where_possible(model: PreTrainedModel) -> None:
    """Have the model take packed rows, in place, if its layers attend to all earlier tokens by transformers' attention
    interface, and packed rows give what single ones do. Else nothing changes."""
    config: Any = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or [FULL_ATTENTION])
    windows = getattr(config, "sliding_window", None) is not None and not hasattr(config, "layer_types")
    before = _implementation(model)
    if before != "sdpa" or kinds != {FULL_ATTENTION} or windows:
        return
    AttentionInterface.register(PACKED, attention)
    try:
        single = [_logits(model, ids[None]) for ids in _probe_rows(model)]
        model.set_attn_implementation(PACKED)
        packing = packing_of(PROBE_LENGTHS, model.device)
        together = torch.cat(_probe_rows(model))[None]
        found = _logits(model, together, position_ids=packing.position_ids, packing=packing)
        fits = torch.allclose(found, torch.cat(single, dim=1), rtol=TOLERANCE, atol=TOLERANCE)
    except Exception:  # fault boundary: many architectures, of which not all take packed rows
        fits = False
    if not fits:
        model.set_attn_implementation(before)


def _implementation(model: PreTrainedModel) -> str:
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def _probe_rows(model: PreTrainedModel) -> list[torch.Tensor]:
    embeddings: Any = model.get_input_embeddings()
    size = embeddings.weight.shape[0]
    return [(torch.arange(n, device=model.device) * 7 + n) % size for n in PROBE_LENGTHS]


def _logits(model: PreTrainedModel, input_ids: torch.Tensor, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=input_ids, use_cache=False, **more).logits
    return logits
