"""What the model's configuration must be like, and the arguments of slime's scripts that describe it.

The Hugging Face folder says all of it, so none of these arguments is needed; one that says something else is a mistake,
such as the arguments of another model.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from buffer_rl.errors import ConfigError
from buffer_rl.files.hf_config import json_object
from buffer_rl.options.section import Section, flag_of, option

if TYPE_CHECKING:
    from buffer_rl.args import Args

ENTRY_POINTS = "buffer_rl_megatron.model"
OWN = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Architectures whose numbers the tests compare with those of transformers. mbridge knows more."""
ROTARY = ("default", "linear", "llama3")


def _said(help: str) -> Any:
    return option(None, f"{help}; compared with --hf-checkpoint")


class ModelShapeOptions(Section):
    """The model's shape; compared with --hf-checkpoint by --train-backend megatron, otherwise ignored."""

    heading: ClassVar[str] = "Megatron model"

    num_layers: int | None = _said("transformer layers")
    hidden_size: int | None = _said("width of the residual stream")
    ffn_hidden_size: int | None = _said("width of the MLP")
    num_attention_heads: int | None = _said("attention heads")
    group_query_attention: bool | None = _said("whether heads share keys and values")
    num_query_groups: int | None = _said("heads of keys and values")
    kv_channels: int | None = _said("width of a head")
    qk_layernorm: bool | None = _said("whether queries and keys are normalised")
    normalization: Literal["RMSNorm", "LayerNorm"] | None = _said("kind of norm")
    norm_epsilon: float | None = _said("epsilon of norms")
    position_embedding_type: Literal["rope"] | None = _said("kind of position embedding")
    use_rotary_position_embeddings: bool | None = _said("rotary position embeddings")
    rotary_base: float | None = _said("base of the rotary position embedding")
    rotary_percent: float | None = _said("part of a head that is rotated")
    vocab_size: int | None = _said("rows of the embedding")
    swiglu: bool | None = _said("whether the MLP is gated by SiLU")
    disable_bias_linear: bool | None = _said("no biases in linear layers")
    add_qkv_bias: bool | None = _said("biases of queries, keys and values")
    untie_embeddings_and_output_weights: bool | None = _said("whether the output layer has weights of its own")
    num_experts: int | None = _said("experts of a layer")
    moe_router_topk: int | None = _said("experts of a token")
    moe_ffn_hidden_size: int | None = _said("width of an expert's MLP")


QKV_BIAS = {"qwen2": True, "qwen2_moe": True}
"""Of architectures whose configuration does not say it."""

QK_NORM = {"qwen3", "qwen3_moe"}


def _qkv_bias(configuration: Mapping[str, Any]) -> bool:
    architecture = str(configuration.get("model_type"))
    return bool(QKV_BIAS.get(architecture, configuration.get("attention_bias", False)))


def _head_width(configuration: Mapping[str, Any]) -> Any:
    if width := configuration.get("head_dim"):
        return width
    return configuration["hidden_size"] // configuration["num_attention_heads"]


def _rotary(configuration: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A number of the rotary embedding: transformers 5 keeps them together."""
    given = configuration.get("rope_parameters") or configuration.get("rope_scaling") or {}
    return given.get(name, configuration.get(name, default))


def _rotary_base(configuration: Mapping[str, Any]) -> Any:
    return _rotary(configuration, "rope_theta")


def _groups(configuration: Mapping[str, Any]) -> Any:
    return configuration.get("num_key_value_heads") or configuration["num_attention_heads"]


OF_CONFIGURATION: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "num_layers": lambda c: c["num_hidden_layers"],
    "hidden_size": lambda c: c["hidden_size"],
    "ffn_hidden_size": lambda c: c["intermediate_size"],
    "num_attention_heads": lambda c: c["num_attention_heads"],
    "group_query_attention": lambda c: _groups(c) != c["num_attention_heads"],
    "num_query_groups": _groups,
    "kv_channels": _head_width,
    "qk_layernorm": lambda c: c.get("model_type") in QK_NORM or bool(c.get("use_qk_norm")),
    "normalization": lambda c: "RMSNorm" if "rms_norm_eps" in c else "LayerNorm",
    "norm_epsilon": lambda c: c.get("rms_norm_eps", c.get("layer_norm_eps")),
    "position_embedding_type": lambda c: "rope" if _rotary_base(c) else "learned_absolute",
    "use_rotary_position_embeddings": lambda c: bool(_rotary_base(c)),
    "rotary_base": _rotary_base,
    "rotary_percent": lambda c: _rotary(c, "partial_rotary_factor", 1.0),
    "vocab_size": lambda c: c["vocab_size"],
    "swiglu": lambda c: c.get("hidden_act") == "silu",
    "disable_bias_linear": lambda c: not c.get("mlp_bias", False),
    "add_qkv_bias": _qkv_bias,
    "untie_embeddings_and_output_weights": lambda c: not c.get("tie_word_embeddings", False),
    "num_experts": lambda c: c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts"),
    "moe_router_topk": lambda c: c.get("num_experts_per_tok"),
    "moe_ffn_hidden_size": lambda c: c.get("moe_intermediate_size", c.get("intermediate_size")),
}
"""What a Hugging Face configuration says of each."""


def read_configuration(folder: str) -> dict[str, Any]:
    """``config.json`` of a Hugging Face folder; empty if it is not there, which others report."""
    file = Path(folder) / "config.json"
    return json_object("--hf-checkpoint", file) if file.exists() else {}


def check_mapped(model_type: str) -> None:
    """Raises ConfigError for an architecture without a mapping to Megatron."""
    others = {entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if model_type not in (*OWN, *others):
        what = f"there is no Megatron mapping of the architecture {model_type}"
        hint = "plugins/buffer_rl_megatron_glm4/README.md says how to write one"
        raise ConfigError(what, where="config.json", expected=", ".join([*OWN, *sorted(others)]), hint=hint)


def check_supported(configuration: Mapping[str, Any]) -> None:
    """Raises ConfigError for what no mapping has."""

    def refuse(what: str, expected: str) -> None:
        raise ConfigError(what, where=f"config.json of {configuration.get('model_type')}", expected=expected)

    rope = configuration.get("rope_parameters") or configuration.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROTARY:
        refuse(f"rotary embeddings of the type {kind}", ", ".join(ROTARY))
    if configuration.get("use_sliding_window") or "sliding_attention" in (configuration.get("layer_types") or ()):
        refuse("layers with sliding window attention", "full attention in all layers")
    if configuration.get("model_type") == "qwen3_moe" and (dense := _dense_layers(configuration)):
        refuse(
            f"layers without experts among those with experts: {', '.join(map(str, dense[:8]))}"
            f"{', …' if len(dense) > 8 else ''} (mlp_only_layers, decoder_sparse_step)",
            "experts in every layer: mlp_only_layers [], decoder_sparse_step 1",
        )
    activation = configuration.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        refuse(f"the activation {activation}", "silu")


def _dense_layers(configuration: Mapping[str, Any]) -> list[int]:
    """The layers that transformers builds without experts."""
    named, step = configuration.get("mlp_only_layers") or (), configuration.get("decoder_sparse_step") or 1
    layers = range(configuration.get("num_hidden_layers") or 0)
    return [layer for layer in layers if layer in named or (layer + 1) % step]


def check_shape(args: Args, configuration: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that says something else than the model's configuration, naming both."""
    if not configuration:
        return
    for name, of_configuration in OF_CONFIGURATION.items():
        given = getattr(args, name)
        if given is None:
            continue
        try:
            found = of_configuration(configuration)
        except KeyError:
            continue  # an architecture that names it otherwise
        if found is not None and given != found:
            what = f"it says {given}, and the model has {found}"
            where = f"{flag_of(name)} and --hf-checkpoint"
            expected = f"{flag_of(name)} {found}, or nothing: the model's configuration says it"
            raise ConfigError(what, where=where, expected=expected, hint="are these the arguments of another model?")
