from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.trainer.collate import _whole_groups, micro_batches

LENGTHS = st.lists(st.integers(0, 50), max_size=60)


def test_rows_are_grouped_from_the_longest_within_the_budget() -> None:
    # 7 | 2 x 5 = 10 | 4 x 2 = 8 (a further row of 2 would make 10, so it fits as well)
    assert micro_batches([2, 5, 2, 7, 5, 2, 2, 2], max_tokens=10) == [[3], [1, 4], [0, 2, 5, 6, 7]]


def test_a_row_longer_than_the_budget_gets_a_micro_batch_of_its_own() -> None:
    assert micro_batches([3, 100, 3], max_tokens=10) == [[1], [0, 2]]


def test_no_rows_make_no_micro_batches() -> None:
    assert micro_batches([], max_tokens=10) == []


@given(LENGTHS, st.integers(1, 200))
def test_every_row_is_in_one_micro_batch_and_padding_fits_the_budget(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


def test_groups_are_together_from_the_longest_within_the_budget() -> None:
    # 2 x 5 = 10; a third row would make 15
    assert _whole_groups([[0], [1], [2]], [2, 5, 2], max_tokens=10) == [[1, 0], [2]]


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), max_size=20), st.integers(1, 200))
def test_groups_stay_whole_and_padding_fits_the_budget(sizes: list[list[int]], budget: int) -> None:
    lengths = [length for group in sizes for length in group]
    rows = iter(range(len(lengths)))
    groups = [[next(rows) for _ in group] for group in sizes]
    batches = _whole_groups(groups, lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        held = [group for group in groups if set(group) & set(batch)]
        assert sorted(row for group in held for row in group) == sorted(batch)
        assert len(held) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


def test_a_budget_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        micro_batches([1], 0)
