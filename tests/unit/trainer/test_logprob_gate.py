"""What is said, before the first optimizer step, of an engine whose log-probabilities are not the trainer's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffer_rl.errors import DataError, TrainError
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from buffer_rl.trainer.logprob_gate import CAUSES, MAX_ROWS, LogProbGap, _Row, compare_log_probs, likely_causes

LENGTH = 12


def args_with(**changes: Any) -> Any:
    options = {"max_logprob_diff": 0.2, "rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_min_p": 0.0}
    return SimpleNamespace(**{**options, "schedule": "lockstep", "max_staleness": None, **changes})


def batch_of(engine: Sequence[Sequence[float]], masks: Sequence[Sequence[int]] | None = None) -> TrainBatch:
    lengths = [len(row) for row in engine]
    chosen = [[1] * length for length in lengths] if masks is None else masks
    return TrainBatch(
        rollout_id=0,
        task="train_0",
        row_ids=[RowId(GroupUid("data", number, 0), 0, 0) for number in range(len(engine))],
        columns={
            "tokens": [np.zeros(length + 1, dtype=np.int32) for length in lengths],
            "response_length": np.array(lengths, dtype=np.int32),
            "loss_mask": [np.array(mask, dtype=np.float32) for mask in chosen],
            "rollout_log_probs": [np.array(row, dtype=np.float32) for row in engine],
        },
    )


def trainer_of(*rows: Sequence[float]) -> Any:
    return lambda batch: [np.array(row, dtype=np.float32) for row in rows]


def test_the_gap_is_the_mean_and_the_largest_difference_of_the_unmasked_tokens() -> None:
    batch = batch_of([[-1.0, -2.0, 0.0], [-3.0]], masks=[[1, 1, 0], [1]])
    gap = compare_log_probs(args_with(), batch, trainer_of([-1.0, -2.3, -99.0], [-3.0]), where="rank 0")
    assert gap.num_tokens == 3
    assert gap.mean == pytest.approx(0.1)
    assert gap.largest == pytest.approx(0.3)
    assert "3 sampled tokens: 0.1 nats apart on average, 0.3 at most" in str(gap)


def test_above_the_limit_the_error_names_the_rows_and_the_causes_in_order() -> None:
    batch = batch_of([[-1.0, -1.0], [-1.0, -5.0]])
    with pytest.raises(TrainError) as caught:
        compare_log_probs(args_with(), batch, trainer_of([-1.0, -1.1], [-1.0, -1.5]), where="trainer rank 3")
    error = caught.value
    assert error.where == "trainer rank 3"
    assert "0.9 nats a token" in error.what  # (0 + 0.1 + 0 + 3.5) / 4
    assert str(batch.row_ids[1]) in error.what
    assert "at response token 1 the engine says -5.0000, the trainer -1.5000" in error.what
    assert error.what.index(str(batch.row_ids[1])) < error.what.index(str(batch.row_ids[0]))  # the worst row first
    assert error.expected == "at most --max-logprob-diff 0.2 on average"
    order = ["weights", "temperature", "prompt", "dtype", "truncated", "positions"]
    places = [error.hint.index(CAUSES[cause]) for cause in order]
    assert places == sorted(places)
    assert "--max-logprob-diff none" in error.hint


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_an_engine_s_log_probability_that_is_not_finite_is_above_every_limit(odd: float) -> None:
    with pytest.raises(TrainError, match="inf nats a token"):
        compare_log_probs(args_with(max_logprob_diff=1e9), batch_of([[-1.0, odd]]), trainer_of([-1.0, -1.0]), where="")


def test_rows_that_no_engine_sampled_are_passed_over() -> None:
    engine = [[math.nan] * 2] * MAX_ROWS + [[-1.0, -2.0]] + [[math.nan] * 9]
    gap = compare_log_probs(args_with(), batch_of(engine), trainer_of([-1.0, -2.2]), where="")
    assert (gap.num_tokens, gap.mean) == (2, pytest.approx(0.1))
    gap = compare_log_probs(args_with(), batch_of(engine[:3]), trainer_of([-1.0, -2.0]), where="")
    assert "no row of the first step has rollout_log_probs" in str(gap)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_the_trainer_cannot_compute_is_left_to_the_step(odd: float) -> None:
    batch = batch_of([[-1.0, -1.0], [-1.0]])
    gap = compare_log_probs(args_with(), batch, trainer_of([-1.0, odd], [-1.0]), where="")
    assert gap == LogProbGap(mean=0.0, largest=0.0, num_tokens=2)
    assert compare_log_probs(args_with(), batch, trainer_of([odd, odd], [odd]), where="") == LogProbGap()


def test_a_row_with_log_probabilities_of_another_length_is_named() -> None:
    batch = batch_of([[-1.0, -1.0], [-1.0]])
    batch.columns["rollout_log_probs"] = [np.zeros(2, dtype=np.float32), np.zeros(3, dtype=np.float32)]
    with pytest.raises(DataError, match="3 values for a response of 1 tokens") as caught:
        compare_log_probs(args_with(), batch, trainer_of([-1.0, -1.0], [-1.0]), where="")
    assert caught.value.where == str(batch.row_ids[1])


def test_the_rows_that_are_computed_again_are_spread_over_the_step_and_hold_the_longest() -> None:
    seen: list[int] = []

    def log_probs(batch: TrainBatch) -> list[np.ndarray]:
        seen.extend(row.uid.row for row in batch.row_ids)
        return [np.full(len(mask), -1.0, dtype=np.float32) for mask in batch.columns["loss_mask"]]

    engine = [[-1.0]] * 40
    engine[13] = [-1.0] * 5
    masks = [[int(number % 2)] * len(row) for number, row in enumerate(engine)]  # the even rows are not trained on
    gap = compare_log_probs(args_with(), batch_of(engine, masks), log_probs, where="")
    assert len(seen) == MAX_ROWS
    assert 13 in seen
    assert all(number % 2 for number in seen)
    assert min(seen) < 5
    assert max(seen) > 30
    assert gap == LogProbGap(mean=0.0, largest=0.0, num_tokens=MAX_ROWS + 4)


def test_a_rank_whose_rows_are_all_masked_computes_too() -> None:
    asked: list[int] = []

    def log_probs(batch: TrainBatch) -> list[np.ndarray]:
        asked.append(len(batch))
        return [np.array([-9.0], dtype=np.float32)] * len(batch)

    masked = batch_of([[-1.0]] * 3, masks=[[0]] * 3)
    assert compare_log_probs(args_with(), masked, log_probs, where="") == LogProbGap()
    assert asked == [1]


def test_only_rows_of_the_version_that_is_trained_are_compared() -> None:
    """A resumed run may begin with rows of several versions; those of others differ, whatever the engine does."""
    asked: list[list[int]] = []

    def log_probs(batch: TrainBatch) -> list[np.ndarray]:
        asked.append([row.uid.row for row in batch.row_ids])
        return [np.array([-1.5], dtype=np.float32)] * len(batch)

    batch = batch_of([[-9.0], [-1.4], [-9.0]])
    batch.rollout_id, batch.columns["weight_version"] = 7, np.array([6, 7, -1], dtype=np.int32)
    gap = compare_log_probs(args_with(schedule="async"), batch, log_probs, where="")
    assert (gap.num_tokens, asked) == (1, [[1]])
    assert gap.mean == pytest.approx(0.1)
    batch.columns["weight_version"] = np.array([6, 6, -1], dtype=np.int32)
    gap = compare_log_probs(args_with(schedule="async"), batch, log_probs, where="")
    assert "no row of the first step has rollout_log_probs, of the weights that it trains" in str(gap)
    assert asked[1:] == [[0]]  # other ranks may wait for this one
    with pytest.raises(TrainError):
        compare_log_probs(args_with(schedule="async", max_staleness=0), batch, log_probs, where="")


def test_without_log_probabilities_or_tokens_nothing_is_compared_and_it_says_so() -> None:
    """Rows without the engine's numbers are passed to the trainer all the same: other ranks may wait for it there."""
    asked: list[int] = []

    def log_probs(batch: TrainBatch) -> list[np.ndarray] | None:
        asked.append(len(batch))
        return None if len(batch) == 2 else [np.array([-9.0], dtype=np.float32)] * len(batch)

    bare = batch_of([[-1.0]])
    del bare.columns["rollout_log_probs"]
    for batch in (bare, batch_of([]), batch_of([[-1.0]] * 2)):
        assert "were not compared" in str(compare_log_probs(args_with(), batch, log_probs, where=""))
    assert asked == [1, 2]


def test_the_gap_of_several_ranks_is_that_of_the_worst() -> None:
    gaps = [
        LogProbGap(),
        LogProbGap(mean=0.1, largest=0.2, num_tokens=3),
        LogProbGap(mean=0.05, largest=1.0, num_tokens=4),
    ]
    assert LogProbGap.worst("actor", gaps) == LogProbGap(mean=0.1, largest=1.0, num_tokens=7)


def causes_of(differences: np.ndarray, engine: np.ndarray | None = None, **options: Any) -> list[str]:
    ours = np.full(LENGTH, -2.0) if engine is None else engine
    row = _Row(RowId(GroupUid("s", 0, 0), 0, 0), np.arange(LENGTH), ours, ours - differences)
    return likely_causes(args_with(**options), [row])


def test_tokens_that_speak_for_a_cause_put_it_first() -> None:
    noise = np.array([1.0, -1.0] * (LENGTH // 2))
    first, last = np.zeros(LENGTH), np.zeros(LENGTH)
    first[:3] = [1.0, -2.0, 1.0]
    last[LENGTH // 2 :] = noise[: LENGTH // 2]
    tool = np.full(LENGTH, -2.0)
    tool[4:6] = 0.0
    assert causes_of(noise)[0] == "weights"
    assert causes_of(first)[0] == "prompt"
    assert causes_of(last)[0] == "positions"
    assert causes_of(np.abs(noise), rollout_top_p=0.9)[0] == "truncated"
    assert causes_of(np.abs(noise))[0] == "weights"  # nothing is truncated
    assert causes_of(np.where(tool == 0.0, 9.0, 0.0), tool)[0] == "unsampled"
    assert "unsampled" not in causes_of(noise)
