"""What a run with the Megatron trainer is told before anything starts. Needs no Megatron but where it says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import ConfigError, PluginError
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl_megatron.model_shape import ModelShapeOptions, check_shape, read_configuration
from buffer_rl_megatron.options import buffer_rl_configure, layout, virtual_stages
from harness.megatron_ranks import HAS_MEGATRON, REASON
from harness.megatron_rows import make_args

SELECTIVE = {"recompute_granularity": "selective"}
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=4)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def test_data_parallelism_is_what_is_left_of_the_ranks(model: str) -> None:
    found = layout(make_args(model, num_train_ranks=16, **{TP: 2, PP: 2}))
    assert (found.dp_size, [rank for rank in range(16) if found.is_head(rank)]) == (4, [8, 10, 12, 14])


@pytest.mark.skipif(not HAS_MEGATRON, reason=REASON)
@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        ({TP: 2, PP: 2, "num_train_ranks": 6}, "--num-train-ranks", "a multiple of 4"),
        ({"context_parallel_size": 2, "num_train_ranks": 3}, "--num-train-ranks", "a multiple of 2"),
        ({"fsdp_size": -1}, "--fsdp-size", "cannot do it"),
        ({"lora_rank": 4}, "--lora-rank", "cannot do it"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload", "cannot do it"),
        ({"save_optim": False}, "--no-save-optim", "cannot do it"),
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl", "--bf16"),
        ({"transformer_impl": "transformer_engine", "bf16": True}, "--transformer-impl", "not installed"),
        ({"moe_grouped_gemm": True}, "--moe-grouped-gemm", "TransformerEngine's"),
        ({"overlap_param_gather": True}, "--overlap-param-gather", "--overlap-grad-reduce"),
        ({"recompute_granularity": "full"}, "--recompute-granularity", "--recompute-num-layers"),
        ({"recompute_num_layers": 1}, "--recompute-method", "--recompute-granularity full"),
        ({"recompute_modules": ["mlp"]}, "--recompute-modules", "--recompute-granularity selective"),
        ({**SELECTIVE, "recompute_modules": ["mlp", "rope"]}, "--recompute-modules", "core_attn, layernorm"),
        ({**SELECTIVE, "recompute_modules": ["moe_act"]}, "--recompute-modules", "--moe-grouped-gemm"),
        ({**SELECTIVE, "recompute_modules": ["layernorm"]}, "--recompute-modules", "TransformerEngine's"),
        ({PP: 3, "num_train_ranks": 3}, "--pipeline-model-parallel-size", "4 layers"),
        ({TP: 8, "num_train_ranks": 8}, "--tensor-model-parallel-size", "4 attention heads"),
        ({TP: 4, "num_train_ranks": 4}, "--tensor-model-parallel-size", "2 query groups"),
        ({"expert_tensor_parallel_size": 2, "num_train_ranks": 2}, "--expert-tensor-parallel-size", "other layers (1)"),
        ({"moe_router_load_balancing_type": "aux_loss"}, "--moe-router-load-balancing-type", "no experts"),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, "--moe-router-load-balancing-type", "aux_loss, or"),
        ({"expert_model_parallel_size": 2, "num_train_ranks": 2}, "--expert-model-parallel-size", "no experts"),
        ({"virtual_pipeline_model_parallel_size": 2}, "--virtual-pipeline-model-parallel-size", "one pipeline stage"),
        ({"num_layers": 28}, "--num-layers", "it says 28, and the model has 4"),
        (
            {"model_converter_path": "my_model:Names"},
            "--model-converter-path",
            "plugins/buffer_rl_megatron_glm4/README.md",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(model: str, changes: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        buffer_rl_configure(make_args(model, **changes))
    assert where in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.skipif(not HAS_MEGATRON, reason=REASON)
@pytest.mark.parametrize(
    ("option", "function", "said"),
    [
        ("custom_megatron_init_path", "absent", "no 'absent'"),
        ("custom_megatron_before_train_step_hook_path", "NUMBER", "--custom-megatron-before-train-step-hook-path"),
        ("custom_megatron_before_log_prob_hook_path", "whole", "expected: (args, model, store_prefix)"),
        ("custom_model_provider_path", "whole", "each rank has a part"),
    ],
)
def test_functions_that_ranks_cannot_call_are_refused(
    model: str, tmp_path: Path, option: str, function: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text("NUMBER = 3\ndef whole(args):\n    pass\n")
    with pytest.raises((ConfigError, PluginError)) as refused:
        buffer_rl_configure(make_args(model, **{option: f"{tmp_path / 'mine.py'}:{function}"}))
    assert said in str(refused.value)


@pytest.mark.skipif(not HAS_MEGATRON, reason=REASON)
def test_options_that_fit_are_taken(model: str, experts: str) -> None:
    buffer_rl_configure(make_args(model, **{TP: 2, PP: 2, "num_train_ranks": 8, "sequence_parallel": True}))
    buffer_rl_configure(make_args(model, sequence_parallel=True))
    buffer_rl_configure(make_args(experts, expert_model_parallel_size=2, num_train_ranks=2))
    buffer_rl_configure(make_args(experts, expert_model_parallel_size=2, num_train_ranks=2, context_parallel_size=2))
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    buffer_rl_configure(make_args(experts, **{PP: 2, "num_train_ranks": 2}, **balanced))
    scripts = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.0}
    buffer_rl_configure(make_args(experts, **scripts, **SELECTIVE, recompute_modules=["moe", "core_attn"]))
    with pytest.raises(ConfigError, match="--sequence-parallel"):
        buffer_rl_configure(make_args(experts, **{TP: 2, "num_train_ranks": 2}))
    split = {TP: 2, "num_train_ranks": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
    buffer_rl_configure(make_args(experts, **split, expert_model_parallel_size=2))
    buffer_rl_configure(make_args(model, **split))  # scripts of models without experts say so too
    with pytest.raises(ConfigError, match="--expert-tensor-parallel-size: Megatron sums"):
        buffer_rl_configure(make_args(experts, **split))


@pytest.mark.skipif(not HAS_MEGATRON, reason=REASON)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt_neox"}, "no Megatron mapping of the architecture gpt_neox"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary embeddings of the type yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rotary embeddings of the type dynamic"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
    ],
)
def test_models_that_megatron_does_not_have_are_refused(
    model: str, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    configuration = {**read_configuration(model), **changes}
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    with pytest.raises(ConfigError, match=said):
        buffer_rl_configure(make_args(str(tmp_path)))


@pytest.mark.skipif(not HAS_MEGATRON, reason=REASON)
@pytest.mark.parametrize(
    ("changes", "layers"), [({"mlp_only_layers": [1, 9]}, "1"), ({"decoder_sparse_step": 2}, "0, 2")]
)
def test_dense_layers_among_layers_of_experts_are_refused_by_number(
    experts: str, tmp_path: Path, changes: dict[str, Any], layers: str
) -> None:
    """The model has 4 layers, and transformers gives experts to those whose number + 1 the step divides."""
    configuration = {**read_configuration(experts), "num_hidden_layers": 4}
    for own, harmless in (({}, True), ({"mlp_only_layers": [], "decoder_sparse_step": 1}, True), (changes, False)):
        (tmp_path / "config.json").write_text(json.dumps({**configuration, **own}))
        if harmless:
            buffer_rl_configure(make_args(str(tmp_path)))
            continue
        with pytest.raises(ConfigError, match=rf"layers without experts among those with experts: {layers} \(mlp_only"):
            buffer_rl_configure(make_args(str(tmp_path)))


def test_options_of_megatron_in_a_run_without_it_are_refused(model: str) -> None:
    buffer_rl_configure(make_args(model, train_backend="torch", **{TP: 1}))
    buffer_rl_configure(make_args(model, train_backend="torch", num_layers=99, swiglu=True))
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size: the run has no Megatron trainer"):
        buffer_rl_configure(make_args(model, train_backend="torch", **{TP: 2}))


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_no_run_saves_among_checkpoints_of_megatron_itself(model: str, tmp_path: Path, backend: str) -> None:
    """A script that starts or resumes names one folder for both, which would look like one without checkpoints."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    for save in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(ConfigError, match="the checkpoints in the folder are Megatron's"):
            buffer_rl_configure(make_args(model, train_backend=backend, save=save))


def test_virtual_stages_by_their_number_or_by_their_layers(model: str) -> None:
    args = make_args(model, **{PP: 2})
    assert virtual_stages(args, 8) is None
    assert virtual_stages(args.model_copy(update={"num_layers_per_virtual_pipeline_stage": 2}), 8) == 2
    assert virtual_stages(args.model_copy(update={"virtual_pipeline_model_parallel_size": 4}), 8) == 4
    with pytest.raises(ConfigError, match="8 layers are not whole parts of 3 layers on 2 stages"):
        virtual_stages(args.model_copy(update={"num_layers_per_virtual_pipeline_stage": 3}), 8)


SHAPE = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "use_rotary_position_embeddings": True,
    "rotary_base": 10000,
    "swiglu": True,
    "disable_bias_linear": True,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "vocab_size": 99,
}
OF_EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
OF_GLM4 = {"rotary_percent": 0.5, "add_qkv_bias": True, "qk_layernorm": False}


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("qwen3", SHAPE), ("qwen3_moe", OF_EXPERTS), ("glm4", OF_GLM4)],
    ids=lambda v: str(v)[:9],
)
def test_the_arguments_of_the_model_are_taken_and_others_refused(
    tmp_path: Path, architecture: str, shape: dict[str, Any]
) -> None:
    model = make_tiny_model(tmp_path, architecture, **({"num_hidden_layers": 4} if architecture == "qwen3" else {}))
    configuration = read_configuration(model)
    check_shape(make_args(model, **shape), configuration)
    for name, said in shape.items():
        other = not said if isinstance(said, bool) else "other" if isinstance(said, str) else said + 1
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} and --hf-checkpoint"):
            check_shape(make_args(model, **{**shape, name: other}), configuration)


def test_every_argument_that_describes_the_model_is_compared_by_a_test() -> None:
    assert {*SHAPE, *OF_EXPERTS} == set(ModelShapeOptions.model_fields)


def test_a_folder_without_a_configuration_is_left_to_others(tmp_path: Path) -> None:
    check_shape(make_args(str(tmp_path), num_layers=7), read_configuration(str(tmp_path)))
