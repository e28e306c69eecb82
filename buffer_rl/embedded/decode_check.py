"""Check of a decoder on a small copy of its model: the copy has the model's architecture and settings and random
weights, and its windows and rope limits are so short that a few tokens pass them all.

A check of the model itself would have to run thousands of tokens to leave a window of 4096, and would compare
half-precision numbers; the copy runs the same code of the architecture in about a second, whatever the size of the
model. It computes in float64 where the architecture can: in float32, rounding alone may send a token to another expert,
and grows over many layers. Its weights are drawn so that attention matters: with an initialisation of 0.02 every token
would get about the same logits, and a wrong mask would not show.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from buffer_rl.embedded.cache import Row, SlotCache
from buffer_rl.errors import EngineError

if TYPE_CHECKING:
    from buffer_rl.embedded.scheduler import Decoder

CONTEXT = 48  # positions of the copy; the rows of the check are shorter
WINDOW = 8
ROPE_LIMIT = 16
NUM_HEADS, HEAD_DIM, WIDTH, VOCAB, NUM_EXPERTS = 4, 16, 32, 128, 8
MAX_PARAMETERS = 50_000_000
NUM_STEPS = 14
MIN_ROW = 19  # several rows become longer
PROMPT_LENGTHS = (6, 9, 13, 23)
LATE_LENGTHS = (12, 19)  # of the rows that take the slots of two others midway
TOLERANCE = 1e-3  # nats; float32 leaves about 1e-5, a mask that is off by one position more than 1e-2

# What a setting of the copy is, by its name in the configurations of transformers.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"hidden_size|n_embd|d_model|embedding_size|word_embed_proj_dim|emb_dim|dim_model", NUM_HEADS * HEAD_DIM),
    (r"(.*_)?head_dim|kv_channels|dim_head", HEAD_DIM),
    (r"rotary_dim", HEAD_DIM // 2),
    (r"(.*_)?(num_(attention_)?heads|n_heads?|attention_heads|num_attention_heads_per_layer)", NUM_HEADS),
    (r".*intermediate_size(_mlp)?|(.*_)?ffn_dim|(.*_)?ffn_hidden_size|n_inner|d_ff|dff|dim_ff|.*_rank", WIDTH),
    (r"hidden_size_per_layer_input", HEAD_DIM),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|zero_expert_num", NUM_EXPERTS),
    (r"num_experts_per_tok(en)?|(moe_)?top_?k(_experts|_group)?|moe_k|n_group|num_expert_group", 2),
    (r"vocab_size(_per_layer_input)?", VOCAB),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions", CONTEXT),
)
_KV_HEADS = re.compile(r"(.*_)?(num_key_value_heads|num_kv_heads|kv_n_heads)")
_ORIGINAL = "original_max_position_embeddings"
_WINDOWS = re.compile(r".*(window(_size)?|local_attention|attention_chunk_size|index_topk)")


class UnsupportedModelError(EngineError):
    """The engine cannot decode this model, or would get other probabilities than the model's own forward pass."""


def unsupported(config: Any, what: str, *, expected: str = "", hint: str = "") -> UnsupportedModelError:
    """The error that refuses a model, by its type and folder."""
    where = f"{config.model_type!r} model {config.name_or_path}".rstrip()
    return UnsupportedModelError(what, where=where, expected=expected, hint=hint or "use another engine for this model")


def check_decoding(build: Callable[[Any, int], Decoder], module: Any, context_length: int) -> None:
    """Compare prefill and batched decode with one pass over the whole sequence, without a cache.

    build: makes the decoder of a module with a context length. Rows of different lengths decode together, leave and
    are replaced. Where no copy can be built the model itself is checked. Raises UnsupportedModelError, naming the
    difference and its position.
    """
    small = _checked_model(module, context_length)
    decoder = build(small, CONTEXT - 1)
    try:
        rows = _decode(decoder)
    except Exception as error:  # fault boundary: an architecture fails in its own way at what it cannot take
        raise unsupported(
            module.config,
            "its forward takes no batch of rows at positions of their own, under a four-dimensional mask, as where "
            f"alibi takes the place of positions: {type(error).__name__}: {error}",
        ) from error
    worst, first = _difference(small, rows)
    if worst > TOLERANCE:
        raise unsupported(
            module.config,
            f"decoding token by token differs from one pass over the whole sequence by {worst:.2g} nats, first at "
            f"position {first}, on a copy with windows of {WINDOW} and a rope limit of {ROPE_LIMIT} where the context "
            f"of {context_length} tokens passes the model's own",
            expected=f"log-probabilities within {TOLERANCE} nats",
            hint="use another engine, or a context length that stays within the model's windows",
        )


def _checked_model(module: Any, context_length: int) -> Any:
    """A small copy, or the model itself, which must then be exact and its windows short."""
    ids = torch.arange(3, 9)[None]
    for dtype in (torch.float64, torch.float32):
        try:
            small = small_copy(module, context_length, dtype)
            with torch.inference_mode():
                small(input_ids=ids, use_cache=False)
        except Exception as error:  # fault boundary: many architectures, and settings that this file does not know
            reason = f"no small copy of it can be built to check the decoding ({type(error).__name__}: {error})"
        else:
            return small
    unreached = [f"{name} {value}" for name, value in _lengths(module.config) if MIN_ROW < value < context_length]
    if unreached:
        raise unsupported(module.config, f"{reason}, and no short row passes {', '.join(unreached)}")
    if module.dtype != torch.float32:
        what = f"{reason}, and {module.dtype} is too coarse for one of itself"
        raise unsupported(module.config, what, hint="--engine-dtype float32")
    return module


def _lengths(config: Any) -> list[tuple[str, int]]:
    """Windows and rope limits of the language model."""
    settings = [vars(config.get_text_config(decoder=True))]
    for name, value in settings[0].items():
        if "rope" in name and isinstance(value, dict):
            settings += [value, *(part for part in value.values() if isinstance(part, dict))]
    pairs = [pair for part in settings for pair in part.items()]
    return [(k, v) for k, v in pairs if type(v) is int and (k == _ORIGINAL or _WINDOWS.fullmatch(k))]


@torch.inference_mode()
def _decode(decoder: Decoder) -> list[tuple[list[int], dict[int, torch.Tensor]]]:
    """Sequences, and the decoder's logits by position."""
    generator = torch.Generator().manual_seed(0)
    cache = SlotCache(decoder.shape)
    live: dict[int, tuple[Row, list[int], dict[int, torch.Tensor]]] = {}
    done: list[tuple[list[int], dict[int, torch.Tensor]]] = []

    def join(lengths: Sequence[int]) -> None:
        size = min(decoder.vocab_size, VOCAB)
        for length in lengths:
            tokens = torch.randint(3, size, (length + NUM_STEPS,), generator=generator).tolist()
            (prefix,) = decoder.prefill([tuple(tokens[:length])])
            row = Row()
            cache.join(prefix, [row])
            live[id(row)] = row, tokens, {length - 1: prefix.logits}
            done.append((tokens, live[id(row)][2]))

    join(PROMPT_LENGTHS)
    for step in range(NUM_STEPS):
        if step == NUM_STEPS // 2:
            cache.leave([row for row, _, _ in live.values()][: 2 * len(LATE_LENGTHS) : 2])
            join(LATE_LENGTHS)
        for row in cache.rows():
            row.token = live[id(row)][1][row.length]
        for row, logits in zip(cache.rows(), decoder.decode(cache), strict=True):
            live[id(row)][2][row.length - 1] = logits
    return done


@torch.inference_mode()
def _difference(module: Any, rows: list[tuple[list[int], dict[int, torch.Tensor]]]) -> tuple[float, int]:
    """The largest difference of a log-probability, in nats, and the first position with one above the tolerance."""
    worst, first = 0.0, CONTEXT
    device = module.get_input_embeddings().weight.device
    for tokens, found in rows:
        logits = module(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0]
        expected = torch.log_softmax(logits, dim=-1)
        for position, own in found.items():
            got = torch.log_softmax(own[: expected.shape[-1]], dim=-1)
            difference = float((got - expected[position]).abs().nan_to_num(nan=float("inf")).max())
            worst = max(worst, difference)
            if difference > TOLERANCE:
                first = min(first, position)
    return worst, first


def small_copy(module: Any, context_length: int, dtype: torch.dtype) -> Any:
    """A model of the class and settings of ``module`` with few and narrow heads and random weights, on the CPU.

    A window or rope limit that ``context_length`` does not pass is not passed by the rows of the check either. Raises
    ValueError, or what the class raises, if it cannot be built.
    """
    config = copy.deepcopy(module.config)
    config._attn_implementation = module.config._attn_implementation
    for name in ("quantization_config", "dtype"):
        if getattr(config, name, None) is not None:
            setattr(config, name, None)
    config._experts_implementation = "eager"  # grouped products take no float64
    _shrink(config, context_length)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in type(module)(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"its copy would have {size} parameters")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        small = type(module)(config).to(device="cpu", dtype=dtype).eval().requires_grad_(False)
        for parameter in small.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim < 2:
                parameter.add_(noise, alpha=0.1)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return small


def _shrink(config: Any, context_length: int) -> None:
    values = dict(vars(config))
    heads = next((v for k, v in values.items() if re.fullmatch(_SIZES[3][0], k) and isinstance(v, int)), NUM_HEADS)
    head_dim = values.get("head_dim") or HEAD_DIM
    if not values.get("head_dim") and isinstance(values.get("hidden_size"), int):
        head_dim = values["hidden_size"] // heads
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            _shrink(value, context_length)
        elif isinstance(value, dict) and "rope" in name:
            setattr(config, name, _short_rope(value, context_length, head_dim))
        elif name.endswith("_token_id") and value is not None:
            setattr(config, name, 0 if name == "pad_token_id" else 1)
        elif isinstance(value, list) and value and all(type(item) is int for item in value):
            setattr(config, name, [_short(name, item, heads, context_length) for item in value])
        elif type(value) is int:
            setattr(config, name, _short(name, value, heads, context_length))


def _short(name: str, value: int, heads: int, context_length: int) -> int:
    if _KV_HEADS.fullmatch(name):
        of_copy = min(heads, NUM_HEADS)
        return of_copy if value == heads else 1 if value == 1 else of_copy // 2
    if _WINDOWS.fullmatch(name):
        return min(value, WINDOW) if value < context_length else max(value, CONTEXT)
    if name == "qk_head_dim":  # qk_nope_head_dim and qk_rope_head_dim
        return 2 * HEAD_DIM
    if name == _ORIGINAL:
        return _short_limit(value, context_length)
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size)
    return value


def _short_limit(value: int, context_length: int) -> int:
    return ROPE_LIMIT if value < context_length else CONTEXT - 1  # transformers wants it below CONTEXT


def _short_rope(rope: dict[str, Any], context_length: int, head_dim: int) -> dict[str, Any]:
    """Rope parameters, or those of each kind of layer, with the limit and the frequencies of the copy."""
    short: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            short[name] = _short_rope(value, context_length, head_dim)
        elif name == _ORIGINAL and value:
            short[name] = _short_limit(value, context_length)
        elif name in ("short_factor", "long_factor"):
            short[name] = value[: max(len(value) * HEAD_DIM // head_dim, 1)]
        elif name == "mrope_section":
            short[name] = [part * HEAD_DIM // head_dim for part in value]
        else:
            short[name] = value
    return short
