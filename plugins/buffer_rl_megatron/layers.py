"""Layers of ``--transformer-impl local``: a norm that knows sequence parallelism, the layer specification that has it,
and what stands in for or behind the output layer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp

MASKED_LOGIT = -1e9
"""Logit of a token that only pads the vocabulary: its probability is exactly 0, and 0 times it is no NaN."""


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4).

    Megatron's own wrapper of it refuses sequence parallelism, under which the gradient of the weight is summed over
    tensor ranks: ``weight.sequence_parallel`` asks for that."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def local_block_spec(config: Any, vp_stage: int | None, core_attention: Any | None) -> Any:
    """Specification of the decoder's layers on this pipeline stage, of Megatron's own modules.

    config: the model's ``TransformerConfig``. core_attention: a module class or specification in place of
    ``DotProductAttention``, which takes neither packed rows nor context parallelism.
    """
    block = copy.deepcopy(
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    )
    block.layer_norm = RMSNorm
    for spec in block.layer_specs:
        layer = spec.submodules
        layer.input_layernorm = RMSNorm
        layer.pre_mlp_layernorm = RMSNorm
        attention = layer.self_attention.submodules
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name) is not IdentityOp:
                setattr(attention, name, RMSNorm)
        if core_attention is not None:
            attention.core_attention = core_attention
        if hasattr(layer.mlp.submodules, "experts"):
            # Checkpoints name it as TransformerEngine's layer does, which before experts is a norm of its own.
            layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return block


class ValueHead(torch.nn.Linear):
    """One number a token, in place of the output layer: the value of the tokens so far. It starts with zeros.

    Every tensor rank has all of it. Returns values ``[sequence, batch, 1]`` in float32, and no bias, as Megatron's
    output layer does with logits."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        self._sequence_parallel: bool = config.sequence_parallel
        torch.nn.init.zeros_(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        values = torch.nn.functional.linear(input_.float(), self.weight.float())
        if self._sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def mask_padded_vocabulary(output_layer: torch.nn.Module, columns: int) -> None:
    """Set the last ``columns`` logits of this tensor rank to ``MASKED_LOGIT`` from now on: the tokens that only pad the
    vocabulary take no part in the softmax, and their weights get no gradient."""

    def mask(_module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        output[0][..., -columns:] = MASKED_LOGIT
        return output

    output_layer.register_forward_hook(mask)
