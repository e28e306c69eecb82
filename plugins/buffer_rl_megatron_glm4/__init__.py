"""GLM-4 (``model_type`` "glm4") for Megatron models: the worked example of plugins/buffer_rl_megatron_glm4/README.md.

What it has that the models of ``buffer_rl_megatron`` have not: a norm behind attention and one behind the feed-forward
layer, gate and up projection as one tensor, and rotary embeddings of half of each head, in interleaved pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from mbridge.core import LLMBridge
from megatron.core.tensor_parallel.layers import RowParallelLinear

from buffer_rl_megatron.layers import RMSNorm

_LAYER = "model.layers.{layer_number}"


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear layer and a norm of its output, which the tensor ranks have summed by then."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.post_norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_)
        return self.post_norm(output), bias


class Glm4Bridge(LLMBridge):  # type: ignore[misc]
    """Configuration, names and layers of GLM-4."""

    _ATTENTION_MAPPING = {  # noqa: RUF012 (the form that mbridge has)
        "self_attention.linear_proj.weight": [f"{_LAYER}.self_attn.o_proj.weight"],
        "self_attention.linear_proj.post_norm.weight": [f"{_LAYER}.post_self_attn_layernorm.weight"],
        "self_attention.linear_qkv.layer_norm_weight": [f"{_LAYER}.input_layernorm.weight"],
        "self_attention.linear_qkv.weight": [f"{_LAYER}.self_attn.{each}_proj.weight" for each in "qkv"],
        "self_attention.linear_qkv.bias": [f"{_LAYER}.self_attn.{each}_proj.bias" for each in "qkv"],
    }
    _MLP_MAPPING = {  # noqa: RUF012
        "mlp.linear_fc1.weight": [f"{_LAYER}.mlp.gate_up_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": [f"{_LAYER}.post_attention_layernorm.weight"],
        "mlp.linear_fc2.weight": [f"{_LAYER}.mlp.down_proj.weight"],
        "mlp.linear_fc2.post_norm.weight": [f"{_LAYER}.post_mlp_layernorm.weight"],
    }

    def _build_config(self) -> Any:
        return self._build_base_config(add_qkv_bias=self.hf_config.attention_bias, rotary_interleaved=True)

    def _get_gptmodel_args(self) -> dict[str, Any]:
        rope = self.hf_config.rope_parameters
        return {**super()._get_gptmodel_args(), "rotary_percent": rope.get("partial_rotary_factor", 1.0)}

    def customize_local_spec(self, block: Any) -> Any:
        """Give each layer of ``--transformer-impl local`` its two further norms."""
        for spec in block.layer_specs:
            layer = spec.submodules
            layer.self_attention.submodules.linear_proj = NormedRowParallelLinear
            layer.mlp.submodules.linear_fc2 = NormedRowParallelLinear
            # Checkpoints name them as slime's layers of TransformerEngine do.
            layer.sharded_state_dict_keys_map |= {
                "self_attention.linear_proj.post_norm.": "post_self_attn_layernorm.",
                "mlp.linear_fc2.post_norm.": "post_mlp_layernorm.",
            }
        return block
