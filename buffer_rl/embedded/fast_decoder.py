"""A decode loop over the weights of a Hugging Face Llama, Qwen2 or Qwen3 model, without its modules.

Weights are prepared once a version: query, key and value projections concatenated, gate and up concatenated, the
weights of the norms folded into the matrices behind them, everything transposed and contiguous (``mm(x, W_t)`` is
faster than ``linear`` at these sizes). Other architectures run through ``buffer_rl.embedded.fallback``.

Shape suffixes: R rows (sequences or tokens), H hidden, Q query heads, K key-value heads, G = Q / K, D head size,
L positions, V vocabulary with its padding (``padded_size``), P prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch.nn import functional

from buffer_rl.embedded.adapter import LowRank, joined, read_adapter, require_none_left
from buffer_rl.embedded.cache import CacheShape, Prefix, SlotCache, SlotPool

# Of sampling. Few columns are padded too: a product computes their rows by place, not all alike.
VOCAB_BLOCK, SMALL_BLOCK = 128, 32
ROW_BLOCK = 16  # rows of one matrix product in deterministic mode
MAX_PREFILL_TOKENS = 8192
MANY_ROWS, SHORT_WIDTH = 32, 128  # in float32 on a CPU, products of matrices are then faster than attention
PROMPT_LOGITS_ROWS = 256  # rows of a large vocabulary that are in memory together
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(slots=True)
class _Layer:
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    low: dict[str, LowRank] = field(default_factory=dict)  # of an adapter, by the matrix

    def tensors(self) -> dict[str, Any]:
        own = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: tensor for name, tensor in own.items() if isinstance(tensor, torch.Tensor)}


_MATRICES: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "qkv": (tuple(f"self_attn.{part}_proj" for part in "qkv"), "input_layernorm"),
    "out": (("self_attn.o_proj",), None),
    "gate_up": (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    "down": (("mlp.down_proj",), None),
}
"""Of a layer, the projections whose outputs each matrix has beside each other, and the norm that is folded into it."""


def padded_size(vocab_size: int) -> int:
    """A multiple of 128, up to which it is one of 32."""
    block = VOCAB_BLOCK if vocab_size > VOCAB_BLOCK else SMALL_BLOCK
    return vocab_size + -vocab_size % block


def pad_vocab(logits: torch.Tensor) -> torch.Tensor:
    """``[R, vocab]`` to float32 ``[R, V]``, the padding at minus infinity."""
    missing = padded_size(logits.shape[-1]) - logits.shape[-1]
    return functional.pad(logits.float(), (0, missing), value=float("-inf"))


@torch.inference_mode()
def _rotary_tables(rotary: Any, shape: CacheShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[context_length + 1, D]``, signed for a plain swap of the halves."""
    positions = torch.arange(shape.context_length + 1, dtype=torch.float32, device=shape.device)
    angles = positions[:, None] * rotary.inv_freq.float().to(shape.device)
    cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
    return torch.cat((cos, cos), dim=-1).to(shape.dtype), torch.cat((-sin, sin), dim=-1).to(shape.dtype)


def _places(at: Any, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of flat positions. By numpy, which divides by one number several times as fast as torch."""
    flat = at.numpy()
    rows = flat // num_columns
    return torch.from_numpy(rows), torch.from_numpy(flat - rows * num_columns)


class FastDecoder:
    """Functional forward passes of one Llama-like model.

    deterministic: matrix products over blocks of a fixed number of rows, one prompt a prefill and attention over
    the full capacity of a sequence's pool, so that a row's result does not depend on the other rows.
    Raises ValueError for a module that ``supports`` refuses.
    """

    def __init__(self, module: Any, context_length: int, *, deterministic: bool = False) -> None:
        if not self.supports(module.config):
            raise ValueError(f"no functional forward for {module.config.model_type!r} with these settings")
        config = module.config
        self.deterministic = deterministic
        self.num_heads = int(config.num_attention_heads)
        self.eps = torch.tensor(float(config.rms_norm_eps), dtype=torch.float64)
        weight = module.lm_head.weight
        self.vocab_size = int(weight.shape[0])
        self.shape = CacheShape(
            num_layers=int(config.num_hidden_layers),
            num_kv_heads=int(config.num_key_value_heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // self.num_heads),
            context_length=context_length,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.load(module)

    @staticmethod
    def supports(config: Any) -> bool:
        """Whether the architecture and its settings are those that this forward implements."""
        rope = getattr(config, "rope_parameters", None) or {}
        return (
            config.model_type in ("llama", "qwen2", "qwen3")
            and getattr(config, "hidden_act", "silu") == "silu"
            and not getattr(config, "mlp_bias", False)
            and not (config.model_type != "qwen2" and getattr(config, "attention_bias", False))
            and all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or [])
            and rope.get("rope_type", "default") in _STATIC_ROPE
            and rope.get("partial_rotary_factor", 1.0) == 1.0
            and getattr(config, "quantization_config", None) is None
        )

    def load(self, module: Any) -> None:
        """Take the weights of ``module``, a model of the same sizes; all of them or, if it fails, none."""
        tables = _rotary_tables(module.model.rotary_emb, self.shape)
        self.load_weights(module.state_dict())
        self.cos, self.sin = tables

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the forward pass reads, under names of its own: prepared tensors have no Hugging Face name."""
        yield from (("embed", self.embed), ("head", self.head))
        for index, layer in enumerate(self.layers):
            yield from ((f"layers.{index}.{name}", tensor) for name, tensor in layer.tensors().items())

    # ------------------------------------------------------------------ weights

    @torch.inference_mode()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take copies of ``weights``, by their Hugging Face names; all of them or, if it fails, none. Number format and
        device may be others. Without ``lm_head.weight``, the head is tied to the embedding."""
        name = "model.embed_tokens.weight"
        embed = self._own(weights[name]).clone()
        layers = [self._layer(weights, f"model.layers.{index}.") for index in range(self.shape.num_layers)]
        padding = embed.new_zeros((padded_size(self.vocab_size) - self.vocab_size, embed.shape[1]))
        head = self._fold([weights.get("lm_head.weight", weights[name]), padding], weights["model.norm.weight"])
        self.embed, self.layers, self.head = embed, layers, head
        self._norms = {
            name: self._own(weight).clone() for name, weight in weights.items() if name.endswith("norm.weight")
        }

    @torch.inference_mode()
    def patch(self, weights: Mapping[str, torch.Tensor], changes: Mapping[str, torch.Tensor | None]) -> bool:
        """Take the elements of ``weights`` at the flat positions ``changes``; elsewhere they are those that were taken
        before. Returns False, with nothing changed, if they have to be taken as a whole: ``load_weights``."""
        if not self.layers or any(at is None for at in changes.values()):
            return False
        parts: list[tuple[torch.Tensor, Any, torch.Tensor]] = []
        at = {name: positions.to(self.shape.device) for name, positions in changes.items() if positions is not None}
        new = {name: self._own(weights[name].view(-1)[changes[name]]) for name in at}
        for name, copied, place_of in self._copies():
            if name in at:
                parts.append((copied, place_of(at[name]), new[name]))
        for target, names, norm in self._matrices("lm_head.weight" in weights):
            scale = None if norm is None else self._own(weights[norm]).float()
            start = 0
            for name in names:
                num_rows, num_columns = weights[name].shape
                if name in at:
                    rows, columns = _places(changes[name], num_columns)
                    index = (columns * target.shape[1] + (rows + start)).to(self.shape.device)
                    values = new[name]
                    if scale is not None:
                        values = (values.float() * scale[columns.to(self.shape.device)]).to(self.shape.dtype)
                    parts.append((target.view(-1), index, values))
                if scale is not None and norm in at:
                    folded = self._own(weights[name][:, changes[norm]]).float() * scale[at[norm]]
                    place = (at[norm], slice(start, start + num_rows))
                    parts.append((target, place, folded.t().to(self.shape.dtype)))
                start += num_rows
        for target, place, values in parts:
            target[place] = values
        return True

    def _copies(self) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], Any]]]:
        """Names of weights that are prepared by copying their elements, where to, and to which index flat positions."""
        yield "model.embed_tokens.weight", self.embed.view(-1), lambda at: at
        yield from ((name, norm, lambda at: at) for name, norm in self._norms.items())
        for number, layer in enumerate(self.layers):
            block, start = f"model.layers.{number}.self_attn.", 0
            for part, num_heads in self._heads().items():
                heads = slice(start, start + num_heads)
                if layer.qkv_bias is not None:
                    yield f"{block}{part}_proj.bias", layer.qkv_bias[start * self.shape.head_dim :], lambda at: at
                if layer.qk_norm is not None and part != "v":
                    yield f"{block}{part}_norm.weight", layer.qk_norm[heads], lambda at: (slice(None), at)
                start += num_heads

    def _matrices(self, has_head: bool) -> Iterator[tuple[torch.Tensor, list[str], str | None]]:
        """Prepared matrices, the names of the weights whose rows are their columns, and of the norm before them."""
        yield self.head, ["lm_head.weight" if has_head else "model.embed_tokens.weight"], "model.norm.weight"
        for number, layer in enumerate(self.layers):
            at = f"model.layers.{number}."
            for part, (names, norm) in _MATRICES.items():
                folded = None if norm is None else f"{at}{norm}.weight"
                yield getattr(layer, part), [f"{at}{name}.weight" for name in names], folded

    @torch.inference_mode()
    def with_adapter(self, folder: str) -> Self:
        """A decoder over the same weights with the adapter in ``folder``, in peft's format. Raises EngineError if it
        is none, or of another model."""
        pairs, adapted = read_adapter(folder), copy(self)
        of_heads = [heads * self.shape.head_dim for heads in self._heads().values()]
        adapted.layers = []
        for index, layer in enumerate(self.layers):
            at, low = f"model.layers.{index}.", {}
            for part, (own, norm) in _MATRICES.items():
                num_inputs, num_outputs = getattr(layer, part).shape
                sizes = of_heads if part == "qkv" else [num_outputs // len(own)] * len(own)
                folded = None if norm is None else self._norms[f"{at}{norm}.weight"]
                if (found := joined(pairs, [at + name for name in own], sizes, num_inputs, folded)) is not None:
                    low[part] = (found[0].to(self.shape.device), found[1].to(self.shape.device))
            adapted.layers.append(replace(layer, low=low))
        require_none_left(pairs)
        return adapted

    def drop_weights(self) -> None:
        """Free the weights, until the next ``load`` or ``load_weights``."""
        layers, self.layers = self.layers, []
        self.embed, self.head = torch.empty(0), torch.empty(0)
        while layers:  # one by one, as other threads stand still while memory is freed
            layers.pop()

    @torch.inference_mode()
    def copy_weights(self) -> None:
        """Have weights of its own, after ``copy`` of another decoder."""
        self.embed, self.head = self.embed.clone(), self.head.clone()
        self._norms = {name: norm.clone() for name, norm in self._norms.items()}
        self.layers = [replace(y, **{name: x.clone() for name, x in y.tensors().items()}) for y in self.layers]

    def swap_weights(self, other: FastDecoder) -> None:
        """Have the weights of ``other``, a decoder of the same sizes, which has these then."""
        for name in ("embed", "layers", "head", "_norms", "cos", "sin"):
            own, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, own)

    def _own(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.shape.device, self.shape.dtype)

    def _fold(self, weights: list[torch.Tensor], norm: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self._own(weight) for weight in weights]).float() * self._own(norm).float()
        return joined.t().to(self.shape.dtype).contiguous()

    def _transposed(self, weight: torch.Tensor) -> torch.Tensor:
        return self._own(weight).t().clone(memory_format=torch.contiguous_format)

    def _layer(self, weights: Mapping[str, torch.Tensor], layer: str) -> _Layer:
        attention, qk_norm = f"{layer}self_attn.", None
        matrices: dict[str, Any] = {}
        biases = [weights[name] for part in "qkv" if (name := f"{attention}{part}_proj.bias") in weights]
        if f"{attention}q_norm.weight" in weights:
            heads = ((part, n) for part, n in self._heads().items() if part != "v")
            qk_norm = torch.cat([self._own(weights[f"{attention}{x}_norm.weight"]).expand(n, -1) for x, n in heads])
        for part, (names, norm) in _MATRICES.items():
            own = [weights[f"{layer}{name}.weight"] for name in names]
            folded = None if norm is None else weights[f"{layer}{norm}.weight"]
            matrices[part] = self._transposed(*own) if folded is None else self._fold(own, folded)
        qkv_bias = torch.cat([self._own(bias) for bias in biases]) if biases else None
        return _Layer(qkv_bias=qkv_bias, qk_norm=qk_norm, **matrices)

    def _heads(self) -> dict[str, int]:
        """How many heads the projections of attention have, in the order of ``qkv``."""
        return {"q": self.num_heads, "k": self.shape.num_kv_heads, "v": self.shape.num_kv_heads}

    # ------------------------------------------------------------------ pieces

    def _mm(self, x_RH: torch.Tensor, weight: torch.Tensor, blocked: bool) -> torch.Tensor:
        if not blocked:
            return torch.mm(x_RH, weight)
        out = torch.empty((x_RH.shape[0], weight.shape[1]), dtype=x_RH.dtype, device=x_RH.device)
        for i in range(0, x_RH.shape[0], ROW_BLOCK):
            torch.mm(x_RH[i : i + ROW_BLOCK], weight, out=out[i : i + ROW_BLOCK])
        return out

    def _add_mm(self, x_RH: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, blocked: bool) -> None:
        if not blocked:
            x_RH.addmm_(a, weight)
            return
        for i in range(0, x_RH.shape[0], ROW_BLOCK):
            x_RH[i : i + ROW_BLOCK].addmm_(a[i : i + ROW_BLOCK], weight)

    def _low_rank(self, x: torch.Tensor, low: LowRank, blocked: bool) -> torch.Tensor:
        return self._mm(self._mm(x.float(), low[0], blocked), low[1], blocked)

    def _product(self, x_RH: torch.Tensor, layer: _Layer, part: str, blocked: bool) -> torch.Tensor:
        found = self._mm(x_RH, getattr(layer, part), blocked)
        if (low := layer.low.get(part)) is not None:
            found = (found + self._low_rank(x_RH, low, blocked)).to(found.dtype)
        return found

    def _add_product(self, x_RH: torch.Tensor, a: torch.Tensor, layer: _Layer, part: str, blocked: bool) -> None:
        self._add_mm(x_RH, a, getattr(layer, part), blocked)
        if (low := layer.low.get(part)) is not None:
            x_RH += self._low_rank(a, low, blocked)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return functional.rms_norm(x, (x.shape[-1],), eps=self.eps.item())
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # one pass; rms_norm makes many
        return x * torch.addcmul(self.eps, size, size, value=1 / x.shape[-1]).rsqrt_()

    def _project(
        self, layer: _Layer, x_RH: torch.Tensor, cos_R1D: torch.Tensor, sin_R1D: torch.Tensor, blocked: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries and keys ``[R, Q + K, D]`` and values ``[R, K * D]``."""
        head_dim = self.shape.head_dim
        rotated = (self.num_heads + self.shape.num_kv_heads) * head_dim
        qkv = self._product(self._norm(x_RH), layer, "qkv", blocked)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        qk = qkv[:, :rotated].reshape(qkv.shape[0], -1, head_dim)
        if layer.qk_norm is not None:
            qk = self._norm(qk) * layer.qk_norm
        half = head_dim // 2
        swapped = torch.cat((qk[..., half:], qk[..., :half]), dim=-1)
        return torch.addcmul(qk * cos_R1D, swapped, sin_R1D), qkv[:, rotated:]

    def _mlp(self, layer: _Layer, x_RH: torch.Tensor, blocked: bool) -> None:
        gate, up = self._product(self._norm(x_RH), layer, "gate_up", blocked).chunk(2, dim=-1)
        self._add_product(x_RH, functional.silu(gate).mul_(up), layer, "down", blocked)

    def _logits(self, x_RH: torch.Tensor, blocked: bool) -> torch.Tensor:
        logits = self._mm(self._norm(x_RH), self.head, blocked).float()
        if logits.shape[1] > self.vocab_size:
            logits[:, self.vocab_size :] = float("-inf")
        return logits

    # ------------------------------------------------------------------ prefill

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[Sequence[int]]) -> list[Prefix]:
        """Run whole sequences, each from its first token; one Prefix each, in order."""
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        results: dict[int, Prefix] = {}
        while order:
            batch = [order.pop()]  # the longest left; shorter ones join while the padded batch stays small
            longest = len(sequences[batch[0]])
            while order and not self.deterministic and longest * (len(batch) + 1) <= MAX_PREFILL_TOKENS:
                batch.append(order.pop())
            prefixes = self._prefill_batch([sequences[i] for i in batch])
            results.update(zip(batch, prefixes, strict=True))
        return [results[i] for i in range(len(sequences))]

    def _forward(
        self, sequences: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Hidden states ``[P * longest, H]``, and keys and values ``[P, K, longest, D]`` of each layer. Padded on the
        right: under a causal mask no real token sees the padding."""
        shape, num_heads = self.shape, self.num_heads
        num_prompts, longest = len(sequences), max(map(len, sequences))
        ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences], device=shape.device)
        x = self.embed[ids.view(-1)]
        cos = self.cos[:longest].repeat(num_prompts, 1)[:, None]
        sin = self.sin[:longest].repeat(num_prompts, 1)[:, None]
        keys, values = [], []
        for layer in self.layers:
            qk, v = self._project(layer, x, cos, sin, blocked=False)
            qk_PHLD = qk.view(num_prompts, longest, -1, shape.head_dim).transpose(1, 2)
            v_PKLD = v.reshape(num_prompts, longest, -1, shape.head_dim).transpose(1, 2)
            q_PQLD, k_PKLD = qk_PHLD[:, :num_heads], qk_PHLD[:, num_heads:]
            attended = functional.scaled_dot_product_attention(
                q_PQLD, k_PKLD, v_PKLD, is_causal=True, enable_gqa=num_heads != shape.num_kv_heads
            )
            self._add_product(x, attended.transpose(1, 2).reshape(x.shape[0], -1), layer, "out", False)
            self._mlp(layer, x, False)
            keys.append(k_PKLD)
            values.append(v_PKLD)
        return x, keys, values

    def _prefill_batch(self, sequences: Sequence[Sequence[int]]) -> list[Prefix]:
        lengths = [len(sequence) for sequence in sequences]
        longest = max(lengths)
        x, keys, values = self._forward(sequences)
        ends = torch.tensor([i * longest + n - 1 for i, n in enumerate(lengths)], device=self.shape.device)
        logits = self._logits(x[ends], blocked=False)
        return [
            Prefix(
                length=n,
                keys=torch.stack([k[i, :, :n] for k in keys]),
                values=torch.stack([v[i, :, :n] for v in values]),
                logits=logits[i].clone(),
            )
            for i, n in enumerate(lengths)
        ]

    @torch.inference_mode()
    def prompt_logits(self, sequence: Sequence[int], start: int) -> Iterator[torch.Tensor]:
        """Logits ``[rows, V]`` float32 behind the positions of ``sequence`` from ``start`` on, in blocks."""
        x, _, _ = self._forward([sequence])
        for at in range(start, len(sequence), PROMPT_LOGITS_ROWS):
            yield self._logits(x[at : at + PROMPT_LOGITS_ROWS], blocked=False)

    # ------------------------------------------------------------------ decode

    @torch.inference_mode()
    def decode(self, cache: SlotCache) -> torch.Tensor:
        """One token for every live row: logits ``[R, V]`` float32 in batch order. Rows grow by one entry."""
        cache.promote()
        rows = cache.rows()
        blocked, device = self.deterministic, self.shape.device
        padding = [0] * (-len(rows) % ROW_BLOCK) if blocked else []
        tokens = torch.tensor([row.token for row in rows] + padding, device=device)
        positions = torch.tensor([row.length for row in rows] + padding, device=device)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        parts = [_PoolPart(pool, self.shape, blocked) for pool in cache.pools()]
        x = self.embed[tokens]
        for index, layer in enumerate(self.layers):
            qk, v = self._project(layer, x, cos, sin, blocked)
            attended, start = [], 0
            for part in parts:
                end = start + part.num_rows
                attended.append(part.attend(index, qk[start:end], v[start:end], self.num_heads))
                start = end
            if padding:
                attended.append(x.new_zeros((len(padding), self.num_heads * self.shape.head_dim)))
            self._add_product(x, attended[0] if len(attended) == 1 else torch.cat(attended), layer, "out", blocked)
            self._mlp(layer, x, blocked)
        for row in rows:
            row.length += 1
        return self._logits(x, blocked)[: len(rows)]


class _PoolPart:
    """Attention of the live rows of one pool, with what is the same in every layer worked out once."""

    def __init__(self, pool: SlotPool, shape: CacheShape, full_width: bool) -> None:
        self.pool, self.shape = pool, shape
        self.num_rows = len(pool.rows)
        lengths = [row.length for row in pool.rows]
        self.width = pool.capacity if full_width else max(lengths) + 1
        on_cpu = shape.device.type == "cpu" and shape.dtype == torch.float32
        self.by_products = on_cpu and not full_width and self.num_rows >= MANY_ROWS and self.width <= SHORT_WIDTH
        positions = torch.tensor(lengths, device=shape.device)
        heads = torch.arange(self.num_rows * shape.num_kv_heads, device=shape.device) * pool.capacity
        self.where = (heads.view(self.num_rows, -1) + positions[:, None]).flatten()
        columns = torch.arange(self.width, device=shape.device)
        shown = (columns <= positions[:, None]).view(self.num_rows, 1, 1, self.width)
        self.mask = torch.where(shown, 0.0, float("-inf")).to(shape.dtype)

    def attend(self, layer: int, qk_RHD: torch.Tensor, v: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Store this step's entries, then attend: ``[R, Q * D]``. The G query heads of a group are query rows."""
        n, num_kv, head_dim = self.num_rows, self.shape.num_kv_heads, self.shape.head_dim
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.view(-1, head_dim).index_copy_(0, self.where, qk_RHD[:, num_heads:].reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, self.where, v.reshape(-1, head_dim))
        q_RKGD = qk_RHD[:, :num_heads].view(n, num_kv, -1, head_dim)
        k_RKLD, v_RKLD = keys[:n, :, : self.width], values[:n, :, : self.width]
        if self.by_products:
            scores = torch.add(self.mask, torch.matmul(q_RKGD, k_RKLD.transpose(2, 3)), alpha=head_dim**-0.5)
            return torch.matmul(scores.softmax(-1), v_RKLD).reshape(n, -1)
        return functional.scaled_dot_product_attention(q_RKGD, k_RKLD, v_RKLD, attn_mask=self.mask).reshape(n, -1)
