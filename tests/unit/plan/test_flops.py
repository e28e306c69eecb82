"""FLOPs of training: numbers worked out by hand, and what torch counts in transformers' models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from buffer_rl.files.hf_config import text_config
from buffer_rl.plan.flops import GATED, PLAIN, RowCost, TrainWork, speed_metrics

QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "sliding_window": 4,
    "use_sliding_window": False,
}
# Of a layer: queries and outputs 8 x 8 each, keys and values 8 x 4 each, three matrices of 8 x 12.
ATTENTION, MLP = 2 * 64 + 2 * 32, 3 * 96


def cost_of(**changes: Any) -> RowCost:
    cost = RowCost.of({**QWEN2, **changes})
    assert cost is not None
    return cost


def test_the_cost_of_a_row_is_that_worked_out_by_hand() -> None:
    assert cost_of().per_token == 2 * (ATTENTION + MLP) == 960
    # Seven tokens, three of the response; the attention of two layers of width 8, each 4 * 8 * 49 / 2.
    assert cost_of().forward(7, 3) == 2 * 960 * 7 + 2 * 80 * 3 + 2 * 784
    assert cost_of().layers(7) == cost_of().forward(7, 0)
    wide = cost_of(head_dim=6)  # heads that together are wider than the model
    assert (wide.width, wide.per_token) == (24, 2 * (8 * 6 * (4 + 2 + 2 + 4) + MLP))


def test_experts_count_if_they_are_active_with_router_and_shared_ones_in_the_layers_that_have_them() -> None:
    moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    sparse = 8 * 6 + 2 * 3 * 8 * 5
    assert cost_of(model_type="qwen3_moe", **moe).per_token == 2 * (ATTENTION + sparse)
    assert cost_of(model_type="qwen3_moe", mlp_only_layers=[0], **moe).per_token == 2 * ATTENTION + sparse + MLP
    shared = sparse + 3 * 8 * 7 + 8
    assert cost_of(shared_expert_intermediate_size=7, **moe).per_token == 2 * (ATTENTION + shared)
    late = cost_of(model_type="glm4_moe", first_k_dense_replace=1, n_shared_experts=1, **moe)
    assert late.per_token == 2 * ATTENTION + MLP + sparse + 3 * 8 * 5


def test_a_window_bounds_the_tokens_that_its_layers_attend_to() -> None:
    kinds = ["full_attention", "sliding_attention"]
    cost = cost_of(use_sliding_window=True, layer_types=kinds)
    pairs = 10 * 10 / 2 + (4 * 4 / 2 + 6 * 4)  # of the window of 4: the first four tokens, and four for each other one
    assert cost.layers(10) == 2 * 960 * 10 + 4 * 8 * pairs
    assert cost.layers(4) == cost_of().layers(4)


def test_a_configuration_that_is_not_understood_has_no_cost() -> None:
    assert RowCost.of(text_config({"model_type": "some_vl", "text_config": QWEN2})) == cost_of()
    for changes in (
        {"model_type": "deepseek_v3"},
        {"hidden_size": None},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["full_attention"]},
        {"use_sliding_window": True},  # which layers have a window is not said
    ):
        assert RowCost.of({**QWEN2, **changes}) is None, changes
    assert RowCost.of({}) is None


@pytest.mark.parametrize("model_type", f"{GATED} {PLAIN}".split())
def test_torch_counts_the_same_in_a_forward_and_backward_pass_of_the_architecture(model_type: str) -> None:
    """But for the causal half: with eager attention torch computes all pairs of tokens."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 160, "head_dim": 24}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
    known = AutoConfig.for_model(model_type).to_dict()  # what a configuration of the architecture says, and no more
    sizes = {name: size for name, size in sizes.items() if name in known}
    config: Any = AutoConfig.for_model(
        model_type, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=16384
    )
    if not config.to_dict().get("layer_types"):
        config.sliding_window = None
    config._attn_implementation = config._experts_implementation = "eager"
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    length = 48
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None] + 3, use_cache=False).logits.sum().backward()
    cost = RowCost.of(config.to_dict())
    assert cost is not None
    halves = 2 * cost.width * 3 * length**2
    assert counter.get_total_flops() == pytest.approx(3 * (cost.forward(length, length) + halves), rel=0.002)


def test_speed_is_of_all_ranks_by_the_slowest_one_and_utilisation_without_recomputing() -> None:
    works = [TrainWork(flops=6 * 10**12, recomputed=10**12, seconds=2.0, peak_tflops=3.0), TrainWork(seconds=4.0)]
    assert speed_metrics(works) == {"perf/actor_train_tflops": 7 / 8, "perf/mfu": 6 / 8 / 3}
    assert speed_metrics([TrainWork(flops=10**12, seconds=2.0)]) == {"perf/actor_train_tflops": 0.5}
    assert speed_metrics([TrainWork(seconds=1.0)]) == speed_metrics([]) == {}
