from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.data.order import epoch_order

MASK = 2**64 - 1


def philox_words(key: tuple[int, int], num_words: int) -> list[int]:
    """Philox4x64-10 written from the paper; numpy counts before each block, so the first counter is 1."""
    words: list[int] = []
    counter = 0
    while len(words) < num_words:
        counter += 1
        c0, c1, c2, c3 = counter, 0, 0, 0
        k0, k1 = key
        for _ in range(10):
            p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
            c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & MASK, (p0 >> 64) ^ c3 ^ k1, p0 & MASK
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
        words += [c0, c1, c2, c3]
    return words[:num_words]


@given(num_rows=st.integers(1, 50), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 10**6))
def test_the_order_is_that_of_an_independent_philox(num_rows: int, seed: int, epoch: int) -> None:
    words = philox_words((seed & MASK, epoch), num_rows)
    expected = sorted(range(num_rows), key=words.__getitem__)
    assert epoch_order(num_rows, seed=seed, epoch=epoch).tolist() == expected


@given(num_rows=st.integers(0, 300), seed=st.integers(), epoch=st.integers(0, 2**40), shuffle=st.booleans())
def test_every_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = epoch_order(num_rows, seed=seed, epoch=epoch, shuffle=shuffle)
    assert sorted(order.tolist()) == list(range(num_rows))


def test_without_shuffling_the_order_is_the_files() -> None:
    assert epoch_order(5, seed=1, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(20, seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_every_row_is_as_likely_as_any_other_to_come_first() -> None:
    counts = [0] * 4
    for epoch in range(4000):
        counts[int(epoch_order(4, seed=7, epoch=epoch)[0])] += 1
    assert all(abs(count - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5 for count in counts)
