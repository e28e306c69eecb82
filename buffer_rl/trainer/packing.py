"""Rows of a micro-batch as one sequence, without padding and with each prompt once, where the model allows it.

All layers but attention work token by token: they get the tokens of all rows one after another, and those of a prompt
that several rows have in common once. Attention lays them out as rows again, in blocks of similar lengths, computes
with its causal kernel, and takes each token's output from there. The last token of a response is left out: nothing is
predicted from it. Values and gradients are those of padded rows.

Suffix legend: ``_m`` is ``[num_tokens]``, the packed tokens; ``_bl`` is ``[num_rows, max_length]``; ``_b`` is
``[num_rows]``; ``_n`` is ``[num_response_tokens]``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations import sdpa_attention

from buffer_rl.embedded.decode_check import ROPE_LIMIT, WINDOW, small_copy
from buffer_rl.trainer.sharding import fsdp_modules

PACKED = "sdpa_of_packed_rows"
"""The name of ``attention`` in transformers."""

SHORT_ROW = 32
"""Up to this length, products of matrices are faster on a CPU than its attention kernel: about twice, both ways."""

FULL_ATTENTION = "full_attention"
Probe = Sequence[tuple[int, int]]
"""Tokens and prompt tokens of the rows that are tried; the first and the last one have a prompt in common."""
SHORT_ROWS: Probe = ((5, 2), (3, 1), (4, 2))
LONG_ROWS: Probe = ((ROPE_LIMIT + 8, WINDOW + 1), (3, 1), (ROPE_LIMIT + 6, WINDOW + 1))
"""They pass every window and rope limit of a small copy, by prompt and response."""
TOLERANCE, TOLERANCE_OF_HALVES = 1e-4, 5e-2
"""Of the largest logit, in float32 and in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows that attention computes together. tokens: ``[num_rows * max_length]`` int64, of each place its packed token;
    any token on padding."""

    num_rows: int
    max_length: int
    tokens: torch.Tensor

    def rows_of(self, states: torch.Tensor) -> torch.Tensor:
        """``[1, num_heads, num_tokens, head_dim]`` to ``[num_rows, num_heads, max_length, head_dim]``."""
        chosen = states[0].transpose(0, 1).index_select(0, self.tokens)
        return chosen.view(self.num_rows, self.max_length, *chosen.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """A micro-batch as packed tokens.

    token_m: int64 ids. position_m: int64, of each its position in its row. blocks: of attention; a row is in one of
    them. output_m: int64, of each token its place in the outputs of all blocks, one after another. predictor_n: int64,
    for each response token the packed token before it. own_bl: which tokens of the rows are packed ones; the others are
    of prompts that an earlier row has, or the last ones of responses.
    """

    token_m: torch.Tensor
    position_m: torch.Tensor
    blocks: tuple[Block, ...]
    output_m: torch.Tensor
    predictor_n: torch.Tensor
    own_bl: np.ndarray

    def inputs(self) -> dict[str, Any]:
        """What the model is called with."""
        return {"input_ids": self.token_m[None], "position_ids": self.position_m[None], "packing": self}


def pack(
    rows: Sequence[np.ndarray], prompt_b: np.ndarray, device: torch.device, experts: Sequence[np.ndarray] | None = None
) -> Packing:
    """rows: of each its tokens, ``[length]`` int32 or int64. prompt_b: how many of them are its prompt, at least one.
    Rows with equal prompts share them, if those have equal ``experts``, ``[length, ...]`` of each row."""
    whole_b = np.array([len(row) for row in rows], dtype=np.int64)
    length_b = np.maximum(whole_b - 1, prompt_b)  # without the last token of a response
    first: dict[bytes, int] = {}
    keys = prompt_keys(rows, prompt_b, experts)
    owner_b = np.array([first.setdefault(key, row) for row, key in enumerate(keys)], dtype=np.int64)
    owns_b = owner_b == np.arange(len(rows))
    step_l = np.arange(int(whole_b.max()))
    real_bl = step_l < length_b[:, None]
    prompt_bl = step_l < prompt_b[:, None]
    own_bl = real_bl & (owns_b[:, None] | ~prompt_bl)
    start_b = np.cumsum(own_bl.sum(-1)) - own_bl.sum(-1)
    of_response_b = start_b - np.where(owns_b, 0, prompt_b)
    packed_bl = np.where(prompt_bl, start_b[owner_b][:, None], of_response_b[:, None]) + step_l
    place_bl = np.zeros_like(packed_bl)
    blocks, offset = [], 0
    for block in similar_rows(length_b):
        width = int(length_b[block].max())
        tokens = np.where(real_bl, packed_bl, 0)[block, :width]
        place_bl[block, :width] = offset + np.arange(tokens.size).reshape(tokens.shape)
        offset += tokens.size
        on_device = torch.from_numpy(tokens.reshape(-1)).to(device)
        blocks.append(Block(num_rows=len(block), max_length=width, tokens=on_device))
    predictor_bl = (step_l >= prompt_b[:, None] - 1) & (step_l < whole_b[:, None] - 1)

    def moved(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)

    token_bl = np.zeros(real_bl.shape, dtype=np.int64)
    token_bl[real_bl] = np.concatenate([row[:length] for row, length in zip(rows, length_b, strict=True)])
    return Packing(
        token_m=moved(token_bl[own_bl]),
        position_m=moved(np.broadcast_to(step_l, real_bl.shape)[own_bl]),
        blocks=tuple(blocks),
        output_m=moved(place_bl[own_bl]),
        predictor_n=moved(packed_bl[predictor_bl]),
        own_bl=own_bl,
    )


def prompt_keys(
    rows: Sequence[np.ndarray], prompts: Sequence[int] | np.ndarray, experts: Sequence[np.ndarray] | None
) -> list[bytes]:
    """Of each row what is equal for rows of equal prompts, whose tokens go to equal experts."""
    keys = [row[:length].tobytes() for row, length in zip(rows, prompts, strict=True)]
    if experts is None:
        return keys
    return [key + own[:length].tobytes() for key, own, length in zip(keys, experts, prompts, strict=True)]


def similar_rows(length_b: np.ndarray, *, equal: bool = False) -> list[np.ndarray]:
    """Row indices in blocks in which no row is shorter than two thirds of the longest: at most a third is padding.
    equal: all rows of a block have one length."""
    blocks: list[np.ndarray] = []
    order = np.argsort(-length_b, kind="stable")
    while order.size:
        longest = length_b[order[0]]
        fits = length_b[order] == longest if equal else 3 * length_b[order] >= 2 * longest
        blocks.append(order[fits])
        order = order[~fits]
    return blocks


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of ``packing``'s rows; without it that of transformers. Raises ValueError for packed rows of a
    layer that has a mask or a window of its own: it does not attend to all earlier tokens."""
    compute: Any = sdpa_attention.sdpa_attention_forward
    if packing is None:
        output, _ = compute(module, query, key, value, attention_mask, **options)
        return output, None
    if attention_mask is not None or options.get("sliding_window") is not None:
        raise ValueError(f"{type(module).__name__} has a mask of its own, which packed rows do not have")
    outputs = []
    if query.is_cuda and query.dtype == torch.float32:
        # Without this, torch has no kernel for heads that share keys, and keeps the matrix of all pairs of tokens.
        key, value = (_one_each(states, query.shape[1]) for states in (key, value))
        compute = _attention_of_equal_heads
    for block in packing.blocks:
        is_short = block.max_length <= SHORT_ROW and query.device.type == "cpu" and query.dtype.itemsize >= 4
        of_block: Any = _attention_of_short_rows if is_short else compute
        output, _ = of_block(module, *(block.rows_of(states) for states in (query, key, value)), None, **options)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs).index_select(0, packing.output_m)[None], None


def _one_each(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    return states.repeat_interleave(num_heads // states.shape[1], dim=1)


def _attention_of_equal_heads(
    _module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    scale = options.get("scaling")
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return output.transpose(1, 2), None


def _attention_of_short_rows(
    _module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    length, head_dim = query.shape[-2:]
    keys, values = (states.reshape(-1, length, head_dim) for states in (key, value))
    queries = query.reshape(len(keys), -1, head_dim)  # heads that share keys are rows of one product
    later = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1)
    scale = options.get("scaling") or head_dim**-0.5
    scores = torch.baddbmm(later.repeat(queries.shape[1] // length, 1), queries, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), values).view(query.shape).transpose(1, 2), None


def is_packed(model: torch.nn.Module) -> bool:
    """Whether the model takes packed rows: ``model(input_ids, position_ids, packing=...)``."""
    return isinstance(model, PreTrainedModel) and _implementation(model) == PACKED


def pack_where_possible(model: PreTrainedModel) -> None:
    """Have the model take packed rows, in place, if its layers attend to all earlier tokens by transformers' attention
    interface, and packed rows give what single ones do: in the model, and past all windows and rope limits of a small
    copy of it; if the model is split over ranks, in the copy alone. Else nothing changes."""
    config: Any = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or [FULL_ATTENTION])
    windows = getattr(config, "sliding_window", None) is not None and not hasattr(config, "layer_types")
    before = _implementation(model)
    if before != "sdpa" or kinds != {FULL_ATTENTION} or windows:
        return
    AttentionInterface.register(PACKED, attention)
    try:
        fits = _packs(small_copy(model, sys.maxsize, torch.float64), LONG_ROWS)
        if any(fsdp_modules(model)):
            model.set_attn_implementation(PACKED)
        else:
            fits = fits and _packs(model, SHORT_ROWS)
    except Exception:  # fault boundary: many architectures, of which not all take packed rows
        fits = False
    if not fits:
        model.set_attn_implementation(before)


def probe_of(model: PreTrainedModel) -> PreTrainedModel:
    """What is tried out in place of the model: of one that is split over ranks a small copy, if there can be one, as a
    pass through the model would gather its largest weights."""
    if any(fsdp_modules(model)):
        with suppress(Exception):  # fault boundary: many architectures
            return cast("PreTrainedModel", small_copy(model, sys.maxsize, torch.float32))
    return model


def _packs(model: PreTrainedModel, probe: Probe) -> bool:
    """Whether packed rows give what single ones do; the model takes them from then on."""
    embeddings: Any = model.get_input_embeddings()
    rows = [(np.arange(length) * 7 + prompt) % embeddings.weight.shape[0] for length, prompt in probe]
    expected = [_logits(model, {"input_ids": torch.from_numpy(row)[None].to(model.device)}) for row in rows]
    model.set_attn_implementation(PACKED)
    packing = pack(rows, np.array([prompt for _, prompt in probe]), model.device)
    found = _logits(model, packing.inputs())[packing.predictor_n]
    wanted = torch.cat([row[prompt - 1 : -1] for row, (_, prompt) in zip(expected, probe, strict=True)])
    # Without the packing, each row sees those before it: a model in which that makes no difference tells nothing.
    mixed = _logits(model, packing.inputs() | {"packing": None})[packing.predictor_n]
    limit = (TOLERANCE if wanted.dtype.itemsize >= 4 else TOLERANCE_OF_HALVES) * wanted.abs().max()
    return bool((found - wanted).abs().max() <= limit < (mixed - wanted).abs().max())


def _implementation(model: PreTrainedModel) -> str:
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def _logits(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    return logits
