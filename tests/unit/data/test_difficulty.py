"""The order by difficulty: compared with the definition, written out for lists, and with orders worked out by hand."""

from __future__ import annotations

import hashlib
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.data.difficulty import DifficultyIterator, Pool, PoolWeights
from buffer_rl.data.order import Cursor, Drawn, WeightedOrder, epoch_order
from buffer_rl.errors import BufferStateError, CheckpointError, ConfigError

PLAIN = "0:1,mid:1,1:1"


def iterator(num_rows: int, weights: str = PLAIN, seed: int = 42, shuffle: bool = True) -> DifficultyIterator:
    return DifficultyIterator(num_rows, seed=seed, shuffle=shuffle, weights=PoolWeights.parse(weights))


def defined_order(num_rows: int, weights: list[int], pools: list[int], seed: int, epoch: int) -> list[Drawn]:
    """One epoch by its definition, with pools that stay."""
    order = epoch_order(num_rows, seed=seed, epoch=epoch).tolist()
    left, drawn = list(order), []
    while left:
        newest = max((order.index(one.row) for one in drawn), default=0)
        total = sum(weights[pools[row]] for row in left)
        passed = [row for row in left if not weights[pools[row]] and (not total or order.index(row) < newest)]
        if passed:
            first = min(passed, key=lambda row: (pools[row], order.index(row)))
            drawn.append(Drawn(first, epoch, True))
        else:
            digest = hashlib.sha256(f"difficulty:{seed}:{epoch}:{len(drawn)}".encode()).digest()
            point = int.from_bytes(digest[:16], "big") % total
            for pool, weight in enumerate(weights):  # the pools as intervals of one line
                rows = [row for row in left if pools[row] == pool]
                if point < weight * len(rows):
                    break
                point -= weight * len(rows)
            drawn.append(Drawn(rows[0], epoch))
        left.remove(drawn[-1].row)
    return drawn


@given(
    pools=st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=30),
    weights=st.tuples(*[st.integers(0, 3)] * 3),
    seed=st.integers(0, 5),
)
def test_an_epoch_is_what_the_definition_says_and_has_each_row_once(
    pools: list[int], weights: tuple[int, int, int], seed: int
) -> None:
    order = iterator(len(pools), f"0:{weights[0]},mid:{weights[1]},1:{weights[2]}", seed)
    first = [order.next() for _ in pools]  # of rows that were not tried, so shuffled
    assert [drawn.row for drawn in first] == epoch_order(len(pools), seed=seed, epoch=0).tolist()
    order.set_rewards({row: pool / 2 for row, pool in enumerate(pools)})
    if not any(weights[pool] for pool in pools):
        with pytest.raises(BufferStateError, match="are in pools of weight 0"):
            order.next()
        assert order.cursor == Cursor(0, len(pools))
        return
    second = [order.next() for _ in pools]
    assert second == defined_order(len(pools), [*weights, 1], pools, seed, 1)
    assert sorted(drawn.row for drawn in second) == list(range(len(pools)))
    assert {drawn.row for drawn in second if drawn.passed} == {r for r, pool in enumerate(pools) if not weights[pool]}
    assert order.num_drawn == len(pools) + sum(not drawn.passed for drawn in second)


def test_the_order_of_six_rows_is_the_one_that_was_worked_out_by_hand() -> None:
    """Rows 0 and 1 are never solved (weight 0), 2 and 3 sometimes (3), 4 and 5 always (1). The shuffled order of epoch
    1 is 0 5 3 4 2 1. The hashes of the positions 0 to 5, modulo the weights that are left, give:

    0: 7 of 8, beyond the 6 of the middle rows, so the first solved one, row 5; 1: row 0 was before it, and is passed
    over; 2: 1 of 7, so row 3; 3: 0 of 4, so row 2; 4: 0 of 1, so row 4; 5: row 1 is passed over at the end.
    """
    assert epoch_order(6, seed=1, epoch=1).tolist() == [0, 5, 3, 4, 2, 1]
    order = iterator(6, "0:0,mid:3,1:1", seed=1)
    for _ in range(6):
        order.next()
    order.set_rewards({0: 0.0, 1: 0.0, 2: 0.5, 3: 0.25, 4: 1.0, 5: 1.0})
    drawn = [order.next() for _ in range(6)]
    assert [one.row for one in drawn] == [5, 0, 3, 2, 4, 1]
    assert [one.row for one in drawn if one.passed] == [0, 1]


def test_a_reward_that_comes_at_the_end_of_an_epoch_still_counts_in_it() -> None:
    """Of rows in file order only row 0 has a weight. Row 2 of the first pool is passed over; then row 3 gets a weight,
    but row 1 is before row 2, so that it is passed over first."""
    order = iterator(4, "0:0,mid:1,1:0", shuffle=False)
    for _ in range(4):
        order.next()
    order.set_rewards({0: 0.5, 1: 1.0, 2: 0.0, 3: 0.0})
    assert [order.next(), order.next()] == [Drawn(0, 1), Drawn(2, 1, True)]
    order.set_rewards({3: 0.5})
    assert [order.next(), order.next()] == [Drawn(1, 1, True), Drawn(3, 1)]


@given(
    pools=st.lists(st.sampled_from([0, 1, 2]), min_size=2, max_size=20),
    before=st.integers(0, 40),
    late=st.lists(st.tuples(st.integers(0, 19), st.sampled_from([0.0, 0.5, 1.0])), max_size=4),
)
def test_an_order_goes_on_from_the_rows_that_left_and_their_rewards(
    pools: list[int], before: int, late: list[tuple[int, float]]
) -> None:
    rewards = {row: pool / 2 for row, pool in enumerate(pools)} | {0: 0.5}
    order, resumed = iterator(len(pools), "0:0,mid:2,1:1"), iterator(len(pools), "0:0,mid:2,1:1")
    for _ in range(len(pools)):
        order.next()
    order.set_rewards(rewards)
    for _ in range(before):
        order.next()
    changes = {row % len(pools): mean for row, mean in late} | {0: 0.5}
    order.set_rewards(changes)  # of rows that are still to come, too
    resumed.take(np.flatnonzero(order.taken), order.cursor)
    resumed.set_rewards(rewards | changes)
    assert [resumed.next() for _ in range(30)] == [order.next() for _ in range(30)]


def test_rows_that_the_ledger_does_not_have_are_noticed() -> None:
    with pytest.raises(CheckpointError, match="the ledger has 2 rows of epoch 3, and the order is at 4"):
        iterator(8).take([1, 2], Cursor(3, 4))


def test_a_pool_is_drawn_with_the_probability_of_its_weight_times_its_rows() -> None:
    rewards = {0: 0.0, 1: 0.0, 2: 0.5, 3: 1.0}  # weights 0.5 · 2, 2 · 1, 1 · 1: a quarter, a half, a quarter
    counts: Counter[int] = Counter()
    num_epochs = 4000
    order = iterator(4, "0:0.5,mid:2,1:1")
    order.set_rewards(rewards)
    for _ in range(num_epochs):
        counts[order.next().row] += 1
        for _ in range(3):
            order.next()
    for row, share in {0: 0.125, 1: 0.125, 2: 0.5, 3: 0.25}.items():
        assert abs(counts[row] - num_epochs * share) < 5 * (num_epochs * share * (1 - share)) ** 0.5


def test_shares_of_sources_count_leased_rows_alone() -> None:
    """The second source has rows of weight 0 only from its second epoch on but for one."""
    made: list[DifficultyIterator] = []

    def make(num_rows: int, seed: int) -> DifficultyIterator:
        made.append(iterator(num_rows, "0:0,mid:1,1:1", seed))
        return made[-1]

    order = WeightedOrder(make, [5, 5], [1, 1], seeds=[1, 2])
    for _ in range(10):
        order.next()
    made[1].set_rewards({0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0, 4: 0.5})
    leased: Counter[int] = Counter()
    for _ in range(80):
        source, drawn = order.next()
        leased[source] += not drawn.passed
        assert abs(leased[0] - leased[1]) <= 1


def test_weights_are_exact_and_the_bounds_are_the_rewards_that_are_named() -> None:
    assert PoolWeights.parse(None) == PoolWeights(low=0.0, high=1.0, weights=(2, 10, 1, 10))
    weights = PoolWeights.parse(" 1:0.1 , mid:1,-1:1/3, unseen:2")
    assert weights == PoolWeights(low=-1.0, high=1.0, weights=(10, 30, 3, 60))
    means = np.array([-1.5, -1.0, -1 + 1e-7, -0.99, 0.0, 0.99, np.float32(1 - 1e-7), 1.0, 3.0])
    assert weights.pools_of(means).tolist() == [Pool.LOW] * 3 + [Pool.MID] * 3 + [Pool.HIGH] * 3
    assert Fraction(weights.weights[0], weights.weights[1]) == Fraction(1, 3)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("mid:1", "0 rewards are named"),
        ("0:1,mid:1", "1 rewards are named"),
        ("0:1,1:1,2:1", "3 rewards are named"),
        ("0:1,0.0:2,1:1", "0.0 is named twice"),
        ("0:1,1:1,mid:1,mid:2", "mid is named twice"),
        ("0:1,1:1,hard:1", "'hard' is no pool"),
        ("0:1,nan:1", "'nan' is no pool"),
        ("0:-1,1:1", "the weight of 0 is -1"),
        ("0:x,1:1", "the weight of 0 is 'x'"),
        ("0:1/0,1:1", "the weight of 0 is '1/0'"),
        ("0,1:1", "'0' is no pool with a weight"),
        ("0:1,1:1,unseen:0", "the weight of unseen is 0"),
    ],
)
def test_weights_that_say_nothing_clear_are_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match="--difficulty-weights") as caught:
        PoolWeights.parse(text)
    assert what in str(caught.value)
