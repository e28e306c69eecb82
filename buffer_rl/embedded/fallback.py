"""Decode loop for any causal language model of Hugging Face, through its own forward and our slots.

Slower than ``FastDecoder`` (one module forward a pool and step) but general: what it asks of a model is a uniform
key-value shape, and that it takes a four-dimensional attention mask and position ids. Whether it gets the model's own
probabilities is checked when the decoder is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from buffer_rl.embedded.adapter import LowRank, joined, read_adapter, require_none_left
from buffer_rl.embedded.cache import CacheShape, Prefix, SlotCache, SlotPool
from buffer_rl.embedded.decode_check import UnsupportedModelError as UnsupportedModelError
from buffer_rl.embedded.decode_check import check_decoding, unsupported
from buffer_rl.embedded.fast_decoder import PROMPT_LOGITS_ROWS, ROW_BLOCK, pad_vocab
from buffer_rl.embedded.routers import find_routers, recorded_experts
from buffer_rl.files.hf_config import length_problem, text_config
from buffer_rl.records.experts import ExpertSizes


class FallbackDecoder:
    """The module's own forward over slots.

    deterministic: the forward runs over the full capacity of a pool, and over blocks of a fixed number of slots: one
    for mixtures of experts, whose experts compute the tokens of all rows that chose them together. check: the decoding
    is compared with whole passes on a small copy of the model (see ``decode_check``). returns_experts: note which
    experts compute each token. Raises UnsupportedModelError for a model without a uniform key-value cache, whose
    probabilities would be others than those of a whole pass, or whose experts cannot be noted.
    """

    def __init__(
        self,
        module: Any,
        context_length: int,
        *,
        deterministic: bool = False,
        check: bool = True,
        returns_experts: bool = False,
    ) -> None:
        self.module = module
        self._adapter: list[tuple[torch.nn.Linear, LowRank]] = []
        self.deterministic = deterministic
        self.block = 1 if _has_experts(module) else ROW_BLOCK
        config = module.config.get_text_config(decoder=True)
        if problem := length_problem(vars(config), context_length):
            reason, limit = problem
            hint = f"--engine-context-length {limit} or less (--context-length of the engine's own command)"
            raise unsupported(module.config, f"{reason}; the context is {context_length} tokens", hint=hint)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if others := kinds - {"full_attention", "sliding_attention"}:
            raise unsupported(module.config, f"layers of kind {sorted(others)} are not supported")
        self.window = getattr(config, "sliding_window", None)
        self.per_kind = "sliding_attention" in kinds and "full_attention" in kinds
        if kinds == {"full_attention"} and hasattr(config, "layer_types"):
            self.window = None
        self.shape = self._probe(module, context_length)
        self.vocab_size = int(module.get_output_embeddings().weight.shape[0])
        self._routers: tuple[str, ...] = ()
        self._dtype: np.dtype[Any] = np.dtype(np.uint8)
        if returns_experts:
            self._routers, self._dtype = _routers_of(module)
        if check:
            check_decoding(partial(type(self), deterministic=deterministic, check=False), module, context_length)

    def load(self, module: Any) -> None:
        """Take the weights of ``module``, a model of the same sizes."""
        self.module = module

    @torch.inference_mode()
    def patch(self, weights: Mapping[str, torch.Tensor], changes: Mapping[str, torch.Tensor | None]) -> bool:
        """As ``FastDecoder.patch``, if the module has all that changed under the same names and shapes."""
        if self.module is None:
            return False
        state, new = self.module.state_dict(), {}
        for name, at in changes.items():
            target = state.get(name)
            if at is None or target is None or target.shape != weights[name].shape or not target.is_contiguous():
                return False
            new[name] = (target.view(-1), at.to(target.device), weights[name].view(-1)[at].to(target))
        for flat, at, values in new.values():
            flat[at] = values
        return True

    def with_adapter(self, folder: str) -> Self:
        """A decoder over the same module with the adapter in ``folder``, in peft's format. Raises EngineError if it is
        none, or of another model."""
        pairs, adapted, parts = read_adapter(folder), copy(self), dict(self.module.named_modules())
        adapted._adapter = []
        for name in [name for name in pairs if isinstance(parts.get(name), torch.nn.Linear)]:
            layer = parts[name]
            low = joined(pairs, [name], [layer.out_features], layer.in_features, None)
            assert low is not None
            device = layer.weight.device
            adapted._adapter.append((layer, (low[0].to(device), low[1].to(device))))
        require_none_left(pairs)
        return adapted

    def _forward(self, **inputs: Any) -> Any:
        """The module's, with the adapter of this decoder or without any."""
        with ExitStack() as hooks:
            for layer, low in self._adapter:
                hooks.enter_context(layer.register_forward_hook(partial(_add_low_rank, low)))
            return self.module(**inputs)

    def drop_weights(self) -> None:
        """Free the weights, until the next ``load``."""
        self.module = None

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the forward pass reads, under the module's names."""
        yield from self.module.state_dict().items() if self.module is not None else ()

    @staticmethod
    @torch.inference_mode()
    def _probe(module: Any, context_length: int) -> CacheShape:
        device = module.get_input_embeddings().weight.device
        cache = DynamicCache()
        ids = torch.zeros((1, 2), dtype=torch.long, device=device)
        try:
            module(input_ids=ids, past_key_values=cache, use_cache=True)
        except Exception as error:  # fault boundary: an architecture fails in its own way at such a cache
            what = f"it takes no plain key-value cache: {type(error).__name__}: {error}"
            raise unsupported(module.config, what) from error
        keys = [getattr(layer, "keys", None) for layer in cache.layers]
        values = [getattr(layer, "values", None) for layer in cache.layers]
        shapes = {None if t is None else (t.shape[1], t.shape[3], t.dtype) for t in keys + values}
        if len(shapes) != 1 or None in shapes:
            what = "its layers do not all keep one key and one value tensor of the same shape"
            raise unsupported(module.config, f"{what}: {sorted(map(str, shapes))}")
        first = keys[0]
        assert first is not None
        return CacheShape(
            num_layers=len(keys),
            num_kv_heads=first.shape[1],
            head_dim=first.shape[3],
            context_length=context_length,
            dtype=first.dtype,
            device=first.device,
        )

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[Sequence[int]]) -> list[Prefix]:
        """Run whole sequences one by one; one Prefix each, in order."""
        return [self._prefill_one(sequence) for sequence in sequences]

    def _prefill_one(self, sequence: Sequence[int]) -> Prefix:
        length, device = len(sequence), self.shape.device
        cache = _RecordingCache(self.shape.num_layers)
        ids = torch.tensor([list(sequence)], device=device)
        with recorded_experts(self.module, self._routers) as chosen:
            out = self._forward(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return Prefix(
            length=length,
            keys=torch.stack([k[0] for k in cache.stored_keys]),
            values=torch.stack([v[0] for v in cache.stored_values]),
            logits=pad_vocab(out.logits[:, -1])[0].clone(),
            experts=self._experts(chosen),
        )

    def _experts(self, chosen: list[torch.Tensor]) -> np.ndarray | None:
        """What the routers chose in a pass, ``[num_tokens, layers, top_k]``."""
        return torch.stack(chosen, 1).cpu().numpy().astype(self._dtype) if chosen else None

    @torch.inference_mode()
    def prompt_logits(self, sequence: Sequence[int], start: int) -> Iterator[torch.Tensor]:
        """Logits ``[rows, V]`` float32 behind the positions of ``sequence`` from ``start`` on."""
        ids = torch.tensor([list(sequence)], device=self.shape.device)
        kept = len(sequence) - start
        logits = self._forward(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0, -kept:]
        for block in logits.split(PROMPT_LOGITS_ROWS):
            yield pad_vocab(block)

    @torch.inference_mode()
    def decode(self, cache: SlotCache) -> torch.Tensor:
        """One token for every live row: logits ``[R, V]`` float32 in batch order. Rows grow by one entry."""
        cache.promote()
        parts: list[torch.Tensor] = []
        for pool in cache.pools():
            step = self.block if self.deterministic else len(pool.rows)
            parts.extend(self._decode_block(pool, start, step) for start in range(0, len(pool.rows), step))
        for row in cache.rows():
            row.length += 1
        return pad_vocab(torch.cat(parts))

    def _decode_block(self, pool: SlotPool, start: int, size: int) -> torch.Tensor:
        rows = pool.rows[start : start + size]
        missing = size - len(rows) if self.deterministic else 0
        tokens = torch.tensor([row.token for row in rows] + [0] * missing, device=self.shape.device)
        positions = torch.tensor([row.length for row in rows] + [0] * missing, device=self.shape.device)
        width = pool.capacity if self.deterministic else int(positions.max()) + 1
        view = _SlotView(pool, start, len(rows), positions, width)
        with recorded_experts(self.module, self._routers) as chosen:
            out = self._forward(
                input_ids=tokens[:, None],
                position_ids=positions[:, None],
                attention_mask=self._masks(positions, width),
                past_key_values=view,
                use_cache=True,
            )
        if (experts := self._experts(chosen)) is not None:
            for row, own in zip(rows, experts, strict=False):  # those of padding are left out
                assert row.experts is not None
                row.experts.append(own[None])
        logits: torch.Tensor = out.logits[: len(rows), -1]
        return logits

    def _masks(self, positions: torch.Tensor, width: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks ``[R, 1, 1, width]``; models with two kinds of layers take one of each kind."""
        columns = torch.arange(width, device=positions.device)
        visible = columns <= positions[:, None]
        full = self._additive(visible)
        if self.window is None:
            return full
        sliding = self._additive(visible & (columns > positions[:, None] - self.window))
        return {"full_attention": full, "sliding_attention": sliding} if self.per_kind else sliding

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=self.shape.dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(self.shape.dtype).min)[:, None, None]


def _routers_of(module: Any) -> tuple[tuple[str, ...], np.dtype[Any]]:
    """The names of the routers, and the numbers that name their experts."""
    sizes = ExpertSizes.of(text_config(module.config.to_dict()))
    routers = find_routers(module)
    if sizes is None or len(routers) != len(sizes.layers):
        what = f"{len(routers)} of its modules are known as routers, for {len(sizes.layers) if sizes else 0} layers"
        raise unsupported(module.config, f"the experts of its tokens cannot be returned: {what}")
    return routers, sizes.dtype


def _has_experts(module: Any) -> bool:
    names = (f"{name} {type(part).__name__}".lower() for name, part in module.named_modules())
    return any(word in name for name in names for word in ("expert", "moe", "router"))


class _RecordingCache(Cache):
    """Keeps what one whole forward stores, without dropping what leaves a sliding window."""

    def __init__(self, num_layers: int) -> None:
        self.layers = []
        self.stored_keys: list[Any] = [None] * num_layers
        self.stored_values: list[Any] = [None] * num_layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.stored_keys[layer_idx], self.stored_values[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    @property
    def is_compileable(self) -> bool:
        return False


class _SlotView(_RecordingCache):
    """The slots of one block as the cache that a module's forward updates."""

    def __init__(self, pool: SlotPool, start: int, live: int, positions: torch.Tensor, width: int) -> None:
        super().__init__(0)
        self.pool, self.start, self.live = pool, start, live
        self.positions, self.width = positions, width
        self.rows = torch.arange(start, start + live, device=positions.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.pool
        return self._store(pool.keys[layer_idx], key_states), self._store(pool.values[layer_idx], value_states)

    def _store(self, memory: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """``states``: ``[R, K, 1, D]``. Padding rows of a deterministic block attend to zeros of their own."""
        live, width = self.live, self.width
        memory[self.rows, :, self.positions[:live]] = states[:live, :, 0]
        window = memory[self.start : self.start + live, :, :width]
        missing = states.shape[0] - live
        if not missing:
            return window
        return torch.cat((window, window.new_zeros((missing, *window.shape[1:]))))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.width, 0


def _add_low_rank(low: LowRank, _: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """For ``register_forward_hook`` of a linear layer."""
    return (output + inputs[0].float() @ low[0] @ low[1]).to(output.dtype)
