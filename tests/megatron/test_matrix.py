"""Two optimizer steps under each parallelism, beside transformers' model with torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.megatron_ranks import RankPool
from harness.megatron_rows import SEEDS, make_args, make_rows
from harness.megatron_steps import LIMITS, Case, Found, beyond, differences, run_case

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]

TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
CP = {"context_parallel_size": 2, "max_tokens_per_gpu": 32}
"""Of a micro-batch's tokens each of the ranks has half."""
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank, packed": (1, "qwen3", {}),
    "one rank, padded": (1, "qwen3", {"qkv_format": "bshd"}),
    "one rank, recomputed layers": (1, "qwen3", FULL),
    "one rank, the first layers recomputed": (
        1,
        "qwen3",
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    ),
    "one rank, recomputed attention": (1, "qwen3", {"recompute_granularity": "selective"}),
    "one rank, recomputed MLP": (1, "qwen3", {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}),
    "one rank, recomputed experts": (
        1,
        "qwen3_moe",
        {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]},
    ),
    "one rank, Llama": (1, "llama", {}),
    "one rank, Qwen2": (1, "qwen2", {}),
    "one rank, untied": (1, "untied", {}),
    "one rank, experts": (1, "qwen3_moe", {}),
    "one rank, experts, scores in double precision": (1, "qwen3_moe", {"moe_router_dtype": "fp64"}),
    "one rank, GLM-4": (1, "glm4", {}),
    "DP2": (2, "qwen3", {}),
    "DP2, whole optimizer": (2, "qwen3", {"use_distributed_optimizer": False}),
    "DP2, overlapped": (2, "qwen3", OVERLAP),
    "TP2": (2, "qwen3", {TP: 2}),
    "TP2, untied": (2, "untied", {TP: 2}),
    "TP2, Qwen2": (2, "qwen2", {TP: 2}),
    "TP2, Llama": (2, "llama", {TP: 2}),
    "TP2, padded": (2, "qwen3", {TP: 2, "qkv_format": "bshd"}),
    "TP2, sequence parallel, GLM-4": (2, "glm4", {TP: 2, "sequence_parallel": True}),
    "TP2, sequence parallel": (2, "qwen3", {TP: 2, "sequence_parallel": True}),
    "TP2, sequence parallel, padded": (2, "qwen3", {TP: 2, "sequence_parallel": True, "qkv_format": "bshd"}),
    "TP2, sequence parallel, recomputed": (2, "qwen3", {TP: 2, "sequence_parallel": True, **FULL}),
    "PP2": (2, "qwen3", {PP: 2}),
    "PP2, untied": (2, "untied", {PP: 2}),
    "PP2, padded": (2, "qwen3", {PP: 2, "qkv_format": "bshd"}),
    "PP2, recomputed": (2, "qwen3", {PP: 2, **FULL}),
    "PP2, VPP2": (2, "qwen3", {PP: 2, "virtual_pipeline_model_parallel_size": 2}),
    "EP2": (2, "qwen3_moe", {"expert_model_parallel_size": 2}),
    "TP2, sequence parallel, experts": (2, "qwen3_moe", {TP: 2, "sequence_parallel": True}),
    "TP2, sequence parallel, EP2": (
        2,
        "qwen3_moe",
        {TP: 2, "sequence_parallel": True, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
    "CP2, TP2, EP4": (
        4,
        "qwen3_moe",
        {
            **CP,
            TP: 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "TP2, PP2": (4, "qwen3", {TP: 2, PP: 2}),
    "TP2, PP2, sequence parallel, VPP2": (
        4,
        "untied",
        {TP: 2, PP: 2, "sequence_parallel": True, "virtual_pipeline_model_parallel_size": 2},
    ),
    "TP2, DP2, overlapped": (4, "qwen3", {TP: 2, **OVERLAP}),
    "CP2": (2, "qwen3", CP),
    "CP2, padded": (2, "qwen3", {**CP, "qkv_format": "bshd"}),
    "CP2, recomputed": (2, "qwen3", {**CP, **FULL}),
    "CP2, Llama": (2, "llama", CP),
    "CP2, TP2, sequence parallel": (4, "qwen3", {**CP, TP: 2, "sequence_parallel": True}),
    "CP2, TP2, sequence parallel, padded": (
        4,
        "untied",
        {**CP, TP: 2, "sequence_parallel": True, "qkv_format": "bshd"},
    ),
    "CP2, PP2, VPP2": (4, "untied", {**CP, PP: 2, "virtual_pipeline_model_parallel_size": 2}),
    "CP2, PP2, padded": (4, "qwen3", {**CP, PP: 2, "qkv_format": "bshd"}),
    "CP2, DP2, overlapped": (4, "qwen3", {**CP, **OVERLAP}),
    "CP2, EP2": (2, "qwen3_moe", {**CP, "expert_model_parallel_size": 2}),
    "CP2, DP2, EP4": (4, "qwen3_moe", {**CP, "expert_model_parallel_size": 4}),
    "CP4": (4, "qwen3", {"context_parallel_size": 4, "max_tokens_per_gpu": 16}),
}
FAULTS: dict[str, tuple[str, str]] = {
    "unsummed_norms": ("TP2, sequence parallel", "grad_norm"),
    "stale_export": ("DP2, overlapped", "weights"),
    "mixed_rows": ("one rank, packed", "outputs"),
    "half_vocabulary": ("TP2", "outputs"),
    "unmarked_post_norms": ("TP2, sequence parallel, GLM-4", "weights"),
    "own_gradient_of_embeddings": ("PP2", "grad_norm"),
    "undivided_gradients_of_experts": ("EP2", "grad_norm"),
    "own_keys": ("CP2", "outputs"),
    "own_gradient_of_keys": ("CP2", "grad_norm"),
    "chunks_in_order": ("CP2", "outputs"),
}
"""Of each fault a case with it, and a difference that must be far beyond its limit."""


def case_of(model: str, name: str, **more: Any) -> Case:
    world_size, _, changes = CASES[name]
    args = make_args(model, num_train_ranks=world_size, **changes, **more)
    return Case(args=args, batches=[make_rows(12, seed) for seed in SEEDS])


@pytest.mark.parametrize("name", CASES)
def test_two_steps_equal_those_of_transformers_and_adamw(
    name: str, ranks: RankPool, model_of: Callable[[str], str], by_transformers: Callable[[str], Found]
) -> None:
    architecture = CASES[name][1]
    assert beyond(run_case(ranks, case_of(model_of(architecture), name)), by_transformers(architecture)) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(
    fault: str, ranks: RankPool, model_of: Callable[[str], str], by_transformers: Callable[[str], Found]
) -> None:
    name, kind = FAULTS[fault]
    architecture = CASES[name][1]
    case = case_of(model_of(architecture), name, custom_megatron_init_path=f"harness.megatron_faults:{fault}")
    found = run_case(ranks, case)
    assert differences(found, by_transformers(architecture))[kind] > 100 * LIMITS[kind]
