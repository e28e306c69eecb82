"""Which architectures there are, and mbridge's mapping of each, made to fit the layers of this package.

An architecture of a third party is a subclass of mbridge's ``LLMBridge``, found by the entry point of the group
``buffer_rl_megatron.model`` that has the name of its ``model_type``: plugins/buffer_rl_megatron_glm4/README.md.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping
from typing import Any

import mbridge  # noqa: F401  (its import fills the registry)
import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from buffer_rl.errors import ConfigError, PluginError
from buffer_rl.plugin.calls import contained, error_name
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.trainer.pretrained import checked_folder
from buffer_rl_megatron.layers import local_block_spec
from buffer_rl_megatron.model_shape import ENTRY_POINTS, check_mapped, check_supported

LOCAL = {
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
}
"""What the local modules lack without Apex and TransformerEngine: kernels of their own."""
_MAPPINGS = ("_DIRECT_MAPPING", "_ATTENTION_MAPPING", "_MLP_MAPPING", "_OTHER_MAPPING")


def read_config(hf_folder: str, *, trust_remote_code: bool = False) -> Any:
    """The folder's configuration, with ``rope_theta`` where mbridge reads it. Raises ConfigError."""
    folder = checked_folder(hf_folder, "Hugging Face folder")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # fault boundary: a damaged configuration fails in many ways
        raise ConfigError(f"config.json does not load: {type(error).__name__}: {error}", where=folder) from error
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        config.rope_theta = rope["rope_theta"]  # transformers 5 keeps it there alone
    return config


def mapping_for(
    hf_config: Any,
    *,
    dtype: torch.dtype,
    transformer_impl: str,
    core_attention: Any | None,
    overrides: Mapping[str, Any],
    vocab_multiple: int,
    model_class: str | None = None,
) -> Any:
    """mbridge's bridge of the architecture, whose configuration, layers and names are those of this package. The
    arguments are those of ``load_bridge``. Raises ConfigError for what the architecture or Megatron cannot do."""
    base = PluginRegistry().load(model_class) if model_class else mapping_class(hf_config.model_type)
    check_supported(hf_config.to_dict())
    fields = {"use_cpu_initialization": not torch.cuda.is_available(), **_corrections(hf_config)}
    if transformer_impl == "local":
        fields |= LOCAL
    elif transformer_impl != "transformer_engine":
        what = f"{transformer_impl} is unknown"
        raise ConfigError(what, where="--transformer-impl", expected="local or transformer_engine")
    fields |= overrides

    def build_base_config(self: Any, **settings: Any) -> Any:
        return base._build_base_config(self, **{**settings, **fields})

    def layer_spec(self: Any, vp_stage: int | None = None) -> Any:
        if transformer_impl == "transformer_engine":
            return base._get_transformer_layer_spec(self, vp_stage)
        customize = getattr(base, "customize_local_spec", None)
        block = local_block_spec(self.config, vp_stage, core_attention)
        return block if customize is None else customize(self, block)

    # Copies, as a bridge with tied embeddings changes the mapping of its class, and with it those made after it.
    own: dict[str, Any] = {name: dict(getattr(base, name, {})) for name in _MAPPINGS}
    embeddings = own["_DIRECT_MAPPING"].get("embedding.word_embeddings.weight")
    if getattr(hf_config, "tie_word_embeddings", False) and embeddings is not None:
        # The last pipeline stage has a copy of them, which mbridge says of the architectures of Qwen2 alone.
        own["_DIRECT_MAPPING"]["output_layer.weight"] = embeddings
    own["_build_base_config"], own["_get_transformer_layer_spec"] = build_base_config, layer_spec
    made = type(base.__name__, (base,), own)
    try:
        mapping = made(hf_config, dtype=dtype, make_vocab_size_divisible_by=vocab_multiple)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"Megatron refuses the model's configuration: {error}", where=hf_config.model_type) from error
    _refuse_uneven(mapping, hf_config)
    return mapping


def mapping_class(model_type: str) -> Any:
    """The class of an entry point of that name, or mbridge's own. Raises ConfigError if there is none."""
    found = importlib.metadata.entry_points(group=ENTRY_POINTS, name=model_type)
    for entry in found:
        try:
            with contained():
                return entry.load()
        except Exception as error:  # fault boundary: code of a third party
            raise PluginError(f"it cannot be imported: {error_name(error)}", where=entry.value) from error
    check_mapped(model_type)
    return _MODEL_REGISTRY[model_type]


def shared_name(name: str, names: Collection[str], layers: Mapping[str, str], first_expert: int) -> str:
    """A parameter's name as mbridge has it: with TransformerEngine's norms inside linear layers, and experts numbered.

    name: in a chunk whose parameters are ``names``. layers: the layer in the whole model by that in the chunk.
    first_expert: the first of the chunk's experts in the whole model.
    """
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return name
    prefix = ".".join(parts[:3])
    parts[2] = layers[parts[2]]
    rest = parts[3:]
    if rest[0] == "input_layernorm":
        rest = ["self_attention", "linear_qkv", f"layer_norm_{rest[1]}"]
    elif rest[0] == "pre_mlp_layernorm" and f"{prefix}.mlp.linear_fc1.weight" in names:
        rest = ["mlp", "linear_fc1", f"layer_norm_{rest[1]}"]
    elif rest[:3] == ["mlp", "experts", "local_experts"]:
        rest = ["mlp", "experts", rest[4], f"{rest[5]}{first_expert + int(rest[3])}"]
    elif rest[:2] == ["mlp", "experts"]:
        rest[-1] = f"weight{first_expert + int(rest[-1].removeprefix('weight'))}"
    return ".".join([*parts[:3], *rest])


def set_rotary_frequencies(model: Any, hf_config: Any) -> None:
    """Give the model the frequencies that transformers computes for a scaled rotary embedding, such as Llama 3's:
    Megatron's own formula has its constants fixed."""
    rope = getattr(hf_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "default" or not hasattr(model, "rotary_pos_emb"):
        return
    rotary = model.rotary_pos_emb
    rotary.inv_freq = ROPE_INIT_FUNCTIONS[kind](hf_config, rotary.inv_freq.device)[0]
    rotary.seq_len_interpolation_factor = None  # mbridge takes any scaling for a linear one


def _corrections(hf_config: Any) -> dict[str, Any]:
    """What mbridge's configuration of the architecture takes for granted and the folder may have otherwise."""
    if hf_config.model_type == "qwen3_moe":
        return {"moe_router_pre_softmax": not hf_config.norm_topk_prob}
    return {}


def _refuse_uneven(mapping: Any, hf_config: Any) -> None:
    mpu = mapping.mpu
    if mapping.config.num_moe_experts and mpu.tp_size > 1 and not mapping.config.sequence_parallel:
        raise ConfigError(
            "Megatron trains experts with tensor parallelism only if it has sequence parallelism, too",
            where="--tensor-model-parallel-size",
            hint="add --sequence-parallel",
        )
    stages = mpu.pp_size * (mpu.vpp_size or 1)
    experts = getattr(hf_config, "num_experts", None) or mpu.ep_size
    for what, count, parts, flag in (
        ("attention heads", hf_config.num_attention_heads, mpu.tp_size, "--tensor-model-parallel-size"),
        ("key and value heads", hf_config.num_key_value_heads, mpu.tp_size, "--tensor-model-parallel-size"),
        ("layers", hf_config.num_hidden_layers, stages, "--pipeline-model-parallel-size"),
        ("experts", experts, mpu.ep_size, "--expert-model-parallel-size"),
    ):
        if count % parts:
            raise ConfigError(f"the model's {count} {what} cannot be divided by {parts}", where=flag)
