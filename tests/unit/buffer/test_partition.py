from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.buffer.readers import balanced_partition

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
