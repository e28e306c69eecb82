from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.buffer.readers import balanced_partition
from buffer_rl.plan.flops import RowCost

LENGTHS = st.lists(st.integers(0, 1000), max_size=60)


def test_the_longest_rows_are_placed_first() -> None:
    # 8 | 7; then 6 joins 7 (13), 5 joins 8 (13), 4 joins the first of the equal parts (17)
    assert balanced_partition([4, 5, 6, 7, 8], 2) == [[0, 1, 4], [2, 3]]


@given(LENGTHS, st.integers(1, 9))
def test_every_row_is_in_exactly_one_part_and_no_part_is_needlessly_empty(lengths: list[int], num: int) -> None:
    parts = balanced_partition(lengths, num)
    assert len(parts) == num
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert sum(1 for part in parts if part) == min(num, len(lengths))


@given(LENGTHS, st.integers(1, 9))
def test_parts_differ_by_at_most_the_longest_row(lengths: list[int], num: int) -> None:
    loads = [sum(lengths[i] for i in part) for part in balanced_partition(lengths, num)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_rows_of_length_zero_spread_over_the_parts() -> None:
    assert balanced_partition([0, 0, 0, 0], 2) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("lengths", "num"), [([1], 0), ([-1], 1)])
def test_nonsense_is_an_error(lengths: list[int], num: int) -> None:
    with pytest.raises(ValueError, match="must"):
        balanced_partition(lengths, num)


def test_parts_of_equal_flops_are_far_more_even_than_those_of_equal_tokens() -> None:
    """The figures of docs/scale.md: Qwen3 0.6B, prompts of 200 tokens, log-normal responses."""
    cost = RowCost(per_token=440_401_920, output_layer=155_582_464, width=2048, num_full=28)
    largest: dict[str, list[float]] = {"tokens": [], "flops": []}
    for seed in range(20):
        responses = np.random.default_rng(seed).lognormal(7.5, 1.0, 64).clip(16, 16000).astype(int).tolist()
        flops = [cost.forward(200 + response, response) for response in responses]
        for name, loads in (("tokens", [200 + response for response in responses]), ("flops", flops)):
            shares = [sum(flops[row] for row in part) for part in balanced_partition(loads, 8)]
            largest[name].append(max(shares) / (sum(flops) / 8))
    assert np.mean(largest["tokens"]) > 1.2
    assert np.mean(largest["flops"]) < 1.08
