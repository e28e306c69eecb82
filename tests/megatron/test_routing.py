"""Routing replay in each layout, beside one that is written by hand, in float64, from the same column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.megatron_ranks import RankPool
from harness.megatron_routing import COLUMN, by_hand, make_moe, make_rows, replay_args, with_experts
from harness.megatron_steps import LIMITS, Case, Found, beyond, differences, run_case

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]

TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SEQUENCE = {TP: 2, "sequence_parallel": True}
VIRTUAL = {PP: 2, "virtual_pipeline_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2, "max_tokens_per_gpu": 16}
PADDED = {"qkv_format": "bshd"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "padded": (1, PADDED),
    "recomputed experts": (1, {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]}),
    "a group each": (1, {"deterministic": True}),
    "DP2": (2, {}),
    "DP2, EP2, padded, recomputed": (2, {EP: 2, **PADDED, **FULL}),
    "TP2, padded": (2, {**SEQUENCE, **PADDED}),
    "TP2, EP2": (2, {**SEQUENCE, EP: 2, "expert_tensor_parallel_size": 1}),
    "PP2, padded": (2, {PP: 2, **PADDED}),
    "PP2, VPP2, recomputed": (2, {**VIRTUAL, **FULL}),
    "CP2, padded": (2, {**CONTEXT, **PADDED}),
    "CP2, EP2, recomputed": (2, {**CONTEXT, EP: 2, **FULL}),
    "TP2, PP2, VPP2, recomputed": (4, {**SEQUENCE, **VIRTUAL, **FULL}),
    "CP2, TP2, padded": (4, {**CONTEXT, **SEQUENCE, **PADDED}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: str) -> Found:
    return by_hand(replay_args(model), with_experts(make_rows()))


@pytest.mark.parametrize("name", CASES)
def test_log_probs_and_gradients_are_those_of_the_rows_experts(
    name: str, model: str, expected: Found, ranks: RankPool
) -> None:
    world_size, changes = CASES[name]
    args = replay_args(model, num_train_ranks=world_size, **changes)
    found = run_case(ranks, Case(args=args, batches=[with_experts(make_rows())]))
    assert beyond(found, expected) == {}
    share = expected.steps[0]["routed_experts_differ"]
    assert found.steps[0]["routed_experts_differ"] == pytest.approx(share, abs=2e-3)  # ties


def test_parts_of_a_step_have_their_own_experts(model: str, expected: Found, ranks: RankPool) -> None:
    args = replay_args(model, num_train_ranks=2, **{PP: 2}, **FULL)
    assert beyond(run_case(ranks, Case(args=args, batches=[with_experts(make_rows())], parts=3)), expected) == {}


def test_weights_of_experts_that_are_not_renormalised(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    args = replay_args(make_moe(tmp_path_factory.mktemp("model"), norm_topk_prob=False))
    batch = with_experts(make_rows())
    assert beyond(run_case(ranks, Case(args=args, batches=[batch])), by_hand(args, with_experts(make_rows()))) == {}


@pytest.mark.parametrize("how", [{}, {PP: 2, "num_train_ranks": 2, **FULL}], ids=["one rank", "PP2, recomputed"])
def test_the_auxiliary_loss_counts_the_experts_that_the_router_would_choose(
    model: str, ranks: RankPool, how: dict[str, Any]
) -> None:
    """As in Megatron, whose auxiliary loss has its own choice of experts; all rows are one micro-batch."""
    more = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "max_tokens_per_gpu": 4096}
    args = replay_args(model, **more)
    plain = by_hand(args, with_experts(make_rows()))
    balanced = by_hand(args, with_experts(make_rows()), balance=0.5)
    assert differences(plain, balanced)["weights"] > 100 * LIMITS["weights"]
    found = run_case(ranks, Case(args=args.model_copy(update=how), batches=[with_experts(make_rows())]))
    assert beyond(found, balanced) == {}


def test_a_critic_replays_nothing(model: str, ranks: RankPool) -> None:
    rng = np.random.default_rng(7)
    batch = with_experts(make_rows())
    for name in ("old_log_probs", "ref_log_probs", "values"):
        batch.columns[name] = [rng.normal(size=size).astype(np.float32) for size in batch.columns["response_length"]]
    args = replay_args(model, advantage_estimator="ppo", use_critic=True)
    found = []
    for column in (batch.columns[COLUMN], [1 - row // 4 for row in batch.columns[COLUMN]]):
        batch.columns[COLUMN] = column  # the second one is no model's
        found.append(run_case(ranks, Case(args=args, batches=[batch.select(range(len(batch)))], critic=True)))
    assert set(differences(*found).values()) == {0.0}
