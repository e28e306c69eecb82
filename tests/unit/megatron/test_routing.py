"""Routing replay beside one that is written by hand, in float64, from the same column."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.errors import ConfigError, DataError
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from buffer_rl.testing.tiny import make_tiny_model
from harness.megatron_ranks import HAS_MEGATRON, REASON, RankError, RankPool
from harness.megatron_steps import LIMITS, Case, Found, beyond, differences, run_case

if not HAS_MEGATRON:
    pytest.skip(REASON, allow_module_level=True)

from harness.megatron_routing import (
    COLUMN,
    by_hand,
    equal_rows,
    log_probs_of_columns,
    make_moe,
    make_rows,
    replay_args,
    with_experts,
)
from harness.replayed_experts import MUTANTS, NUM_EXPERTS

pytestmark = pytest.mark.timeout(300)

STAGES = {"num_train_ranks": 2, "pipeline_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SEQUENCE = {"num_train_ranks": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
FAULT = {"custom_megatron_init_path": "harness.megatron_faults:experts_of_the_last_forward_pass"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: str) -> Found:
    return by_hand(replay_args(model), with_experts(make_rows()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="one rank"),
        pytest.param({"num_train_ranks": 2, "expert_model_parallel_size": 2}, id="EP2"),
        pytest.param(SEQUENCE, id="TP2"),
        pytest.param(STAGES | FULL, id="PP2, recomputed"),
    ],
)
def test_log_probs_and_gradients_are_those_of_the_rows_experts(
    changes: dict[str, Any], model: str, expected: Found, ranks: RankPool
) -> None:
    case = Case(args=replay_args(model, **changes), batches=[with_experts(make_rows())])
    found = run_case(ranks, case)
    assert beyond(found, expected) == {}
    share = expected.steps[0]["routed_experts_differ"]
    assert found.steps[0]["routed_experts_differ"] == pytest.approx(share, abs=2e-3)  # ties
    assert 0.9 < share < 1


@pytest.mark.slow
def test_the_reference_goes_where_its_own_routers_send_it(model: str, ranks: RankPool) -> None:
    """The reference has the policy's weights, in the same process."""
    more = {"use_kl_loss": True, "kl_loss_coef": 0.5, "ref_load": model}
    batch = with_experts(make_rows())
    reference = by_hand(replay_args(model), with_experts(make_rows()), replays=False).outputs
    batch.columns["ref_log_probs"] = [reference[row] for row in batch.row_ids]
    args = replay_args(model, **more)
    expected = by_hand(args, batch)
    assert expected.steps[0]["kl_loss"] > 0.1
    assert max(np.abs(rows - expected.outputs[row]).max(initial=0) for row, rows in reference.items()) > 1
    args = args.model_copy(update=STAGES | FULL)
    found = run_case(ranks, Case(args=args, batches=[batch], model="ref"))
    assert found.steps[0]["kl_loss"] == pytest.approx(expected.steps[0]["kl_loss"], rel=1e-5)
    expected.outputs = reference
    assert beyond(found, expected) == {}


@pytest.mark.slow
def test_other_experts_give_other_log_probs(model: str, expected: Found, ranks: RankPool) -> None:
    """Those that a wrong layer, token or row, or a permutation, would replay."""
    batch = with_experts(make_rows())
    column = batch.columns[COLUMN]
    mutants = {name: mutant(column) for name, mutant in MUTANTS.items()}
    mutants["experts numbered from 1"] = [(experts + 1) % NUM_EXPERTS for experts in column]
    (found,) = ranks.run(1, log_probs_of_columns, replay_args(model), batch, [column, *mutants.values()])
    gaps = [
        np.array(
            [
                np.abs(row - expected.outputs[row_id]).max(initial=0)
                for row_id, row in zip(batch.row_ids, rows, strict=True)
            ]
        )
        for rows in found
    ]
    assert gaps[0].max() < LIMITS["outputs"]
    has_some = batch.columns["response_length"] > 0
    for name, gap in zip(mutants, gaps[1:], strict=True):
        assert (gap[has_some] > 100 * LIMITS["outputs"]).mean() > 0.8, name


@pytest.mark.slow
def test_a_recomputed_layer_has_the_experts_of_its_own_micro_batch(model: str, ranks: RankPool) -> None:
    """The first stage computes a micro-batch forward before the one before it backward; all have as many tokens."""
    args = replay_args(model, **STAGES, **FULL, max_tokens_per_gpu=16)
    expected = by_hand(args, equal_rows())
    assert beyond(run_case(ranks, Case(args=args, batches=[equal_rows()])), expected) == {}
    stale = run_case(ranks, Case(args=args.model_copy(update=FAULT), batches=[equal_rows()]))
    assert differences(stale, expected)["weights"] > 100 * LIMITS["weights"]


@pytest.mark.slow
def test_without_the_option_the_routers_choose(model: str, ranks: RankPool) -> None:
    args = replay_args(model).model_copy(update={"replay_routed_experts": False})
    column, none = (
        run_case(ranks, Case(args=args, batches=[batch])) for batch in (with_experts(make_rows()), make_rows())
    )
    assert set(differences(column, none).values()) == {0.0}
    assert beyond(column, by_hand(args, with_experts(make_rows()), replays=False)) == {}


@pytest.mark.slow
def test_a_model_whose_layers_have_no_routers_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path, "qwen3")
    with pytest.raises(RankError, match="the model has no experts"):
        run_case(ranks, Case(args=replay_args(dense), batches=[]))


def test_a_router_that_does_not_ask_is_refused() -> None:
    from buffer_rl_megatron.routing import _Choice

    with pytest.raises(ConfigError, match="the router Linear of layer 3 does not ask"):
        _Choice(torch.nn.Linear(1, 1), 3)


def rows_of(*experts: np.ndarray, lengths: tuple[int, ...] = (3, 1, 3)) -> TrainBatch:
    tokens = [np.zeros(length, dtype=np.int32) for length in lengths]
    row_ids = [RowId(GroupUid("data", row, 0), 0) for row in range(len(lengths))]
    return TrainBatch(rollout_id=0, task="train_0", row_ids=row_ids, columns={"tokens": tokens, COLUMN: list(experts)})


def numbered(num_tokens: int, start: int = 0) -> np.ndarray:
    """Token t has the experts ``2 (start + t)`` and ``2 (start + t) + 1``, in the second of two layers in reverse."""
    even = 2 * np.arange(start, start + num_tokens, dtype=np.uint8)
    return np.stack([np.stack([even, even + 1], -1), np.stack([even + 1, even], -1)], 1)


SIZES = {"num_layers": 2, "num_experts": 8, "k": 2}


def test_a_tokens_experts_are_found_by_its_row_and_place() -> None:
    """The last token of a row, one whose experts the column lacks, and padding have none."""
    from buffer_rl_megatron.routing import experts_of, places_of_experts

    args: Any = SimpleNamespace(sequence_parallel=False)
    rows = rows_of(numbered(2), numbered(0), numbered(1, start=2))
    row_t, step_t = np.array([0, 0, 0, 1, 2, 2, 2, 3, 3]), np.array([0, 1, 2, 0, 0, 1, 2, 0, 1])
    place_t = places_of_experts(args, rows, row_t, step_t)
    assert place_t is not None
    assert place_t.tolist() == [0, 1, -1, -1, 2, -1, -1, -1, -1]
    found = experts_of(rows, place_t[[4, 1, 2]], [1, 0], **SIZES)
    assert found.tolist() == [[[5, 4], [4, 5]], [[3, 2], [2, 3]], [[-1, -1], [-1, -1]]]
    rows.columns.pop(COLUMN)
    assert places_of_experts(args, rows, row_t, step_t) is None


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (numbered(3), r"shape \(3, 2, 2\), .*at most 2 tokens, 2 layers with experts, in each 2 of 8"),
        (numbered(2)[:, :1], r"shape \(2, 1, 2\)"),
        (numbered(2)[..., :1], r"shape \(2, 2, 1\)"),
        (numbered(1) + 8, "numbers up to 9"),
        (numbered(1).astype(np.int16) - 1, "numbers up to 0"),
    ],
)
def test_experts_of_another_model_are_refused(experts: np.ndarray, said: str) -> None:
    from buffer_rl_megatron.routing import experts_of

    with pytest.raises(DataError, match=f"(?s){said}") as caught:
        experts_of(rows_of(experts, lengths=(3,)), np.zeros(1, dtype=np.int64), [0, 1], **SIZES)
    assert "data" in str(caught.value)
