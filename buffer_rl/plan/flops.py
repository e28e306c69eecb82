"""Floating-point operations of training on rows, from the configuration of a decoder-only transformer.

A product of a matrix with a vector is two operations for each weight. With ``N`` weights in the products of the layers
and ``V`` in that of the output layer, a forward pass over a row of ``n`` tokens, ``r`` of them of the response, is

    2 N n + 2 V r + 4 L w n^2 / 2

for ``L`` layers whose attention is ``w = num_heads * head_dim`` wide: keys and values are ``2 w`` operations each for a
pair of tokens, and causal attention has half of the pairs (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). The
output layer counts where a response token is predicted: the loss needs no more, and the torch trainer computes no more.
A backward pass is two forward passes; layers that are recomputed have one more (Narayanan et al. 2021,
arXiv:2104.04473, appendix). Utilisation (MFU) is without recomputation (PaLM, arXiv:2204.02311, appendix B). The last
two papers count all pairs of tokens, so that their attention is twice this one.

Left out: embeddings (look-ups), norms, activations, rotary positions, softmax, loss and optimizer; tokens of padding;
vision towers, adapters and multi-token prediction. A prompt counts for each of its rows, although packed rows may
compute its layers once; experts count as if no token were dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buffer_rl.records.experts import sparse_layers

GATED = (
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi3 olmo olmo2 olmo3 smollm3 "
    "granite granitemoe glm glm4 glm4_moe cohere cohere2 seed_oss ernie4_5 gpt_oss hunyuan_v1_dense exaone4"
)
"""``model_type`` of architectures of multi-head attention and an MLP of three matrices."""
PLAIN = "phi starcoder2 nemotron arcee apertus"
"""The same with an MLP of two matrices."""
_LAYERS = {"full_attention", "sliding_attention"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """What a model computes on a row.

    per_token: weights in the matrix products of all layers that a token passes: with experts, of those that are active,
    the router and the shared ones. output_layer: its weights. width: of attention, heads times their dimension.
    num_full, num_windowed: layers by the tokens that they attend to: all earlier ones, or ``window``.

    Example:
        cost = RowCost(per_token=440_401_920, output_layer=155_582_464, width=2048, num_full=28)  # Qwen3 0.6B
        assert cost.forward(1000, 800) == 2 * 440_401_920 * 1000 + 2 * 155_582_464 * 800 + 2 * 28 * 2048 * 1000**2
    """

    per_token: int
    output_layer: int
    width: int
    num_full: int
    num_windowed: int = 0
    window: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RowCost | None:
        """Of the ``config.json`` of a language model (see ``files.hf_config.text_config``); None if the architecture is
        not in the lists above, a number is missing, or it has layers of another kind, such as linear attention."""
        kind = str(config.get("model_type"))
        matrices = {**dict.fromkeys(GATED.split(), 3), **dict.fromkeys(PLAIN.split(), 2)}.get(kind)
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        numbers = [config.get(name) for name in names]
        if matrices is None or not all(isinstance(number, int) and number > 0 for number in numbers):
            return None
        hidden, layers, heads, inner, vocab = (int(number or 0) for number in numbers)
        window = config.get("sliding_window") if config.get("use_sliding_window") is not False else None
        kinds = config.get("layer_types") or ([] if window else ["full_attention"] * layers)
        if len(kinds) != layers or not _LAYERS.issuperset(kinds) or ("sliding_attention" in kinds and not window):
            return None
        head_dim = config.get("head_dim") or hidden // heads
        key_heads = config.get("num_key_value_heads") or heads
        attention = hidden * head_dim * (2 * heads + 2 * key_heads)
        return cls(
            per_token=layers * attention + _mlp(config, hidden, layers, inner, matrices),
            output_layer=hidden * vocab,
            width=heads * head_dim,
            num_full=kinds.count("full_attention"),
            num_windowed=kinds.count("sliding_attention"),
            window=window or 0,
        )

    def layers(self, length: int) -> int:
        """FLOPs of the layers in a forward pass over a row of ``length`` tokens."""
        seen = length * length if length <= self.window else self.window * (2 * length - self.window)
        pairs = self.num_full * length * length + self.num_windowed * seen  # twice those of all layers
        return 2 * self.per_token * length + 2 * self.width * pairs

    def forward(self, length: int, num_response_tokens: int) -> int:
        """FLOPs of a forward pass over a row, with the output layer at the predictions of its response tokens."""
        return self.layers(length) + 2 * self.output_layer * num_response_tokens


def _mlp(config: Mapping[str, Any], hidden: int, layers: int, inner: int, matrices: int) -> int:
    """Weights of all layers' MLPs or active experts."""
    dense = matrices * hidden * inner
    experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
    if not experts:
        return layers * dense
    expert_inner = int(config.get("moe_intermediate_size") or inner)
    active = int(config.get("num_experts_per_tok") or 1) + int(config.get("n_shared_experts") or 0)
    sparse = hidden * experts + active * matrices * hidden * expert_inner
    if shared := int(config.get("shared_expert_intermediate_size") or 0):
        sparse += matrices * hidden * shared + hidden  # and its gate
    num_sparse = len(sparse_layers(config))
    return num_sparse * sparse + (layers - num_sparse) * dense


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWork:
    """What one rank computed in a rollout's optimizer steps. flops: of forward and backward passes over its own rows,
    0 on a rank that is not the head of its replica; recomputed: on top of these. seconds: from the first pass to the
    end of the last step. peak_tflops: of the rank's device, if it is known."""

    flops: int = 0
    recomputed: int = 0
    seconds: float
    peak_tflops: float | None = None


def speed_metrics(works: Sequence[TrainWork]) -> dict[str, float]:
    """Of the works of all ranks: TFLOP/s of a rank, by the seconds of the slowest one, and the utilisation of its
    device, whose peak it is divided by. Empty if nothing was computed."""
    rank_seconds = len(works) * max((work.seconds for work in works), default=0.0)
    flops = sum(work.flops for work in works)
    if not flops or rank_seconds <= 0:
        return {}
    metrics = {"perf/actor_train_tflops": (flops + sum(work.recomputed for work in works)) / rank_seconds / 1e12}
    if works[0].peak_tflops is not None:
        metrics["perf/mfu"] = flops / rank_seconds / 1e12 / works[0].peak_tflops
    return metrics
