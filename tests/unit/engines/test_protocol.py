"""Ids and seeds of the rows of a request, against plain Python and the published generator."""

from __future__ import annotations

import numpy as np
import pytest

from buffer_rl.engines.protocol import GOLDEN, ROWS, mix64, row_seeds


def splitmix64_in_plain_python(z: int) -> int:
    mask = (1 << 64) - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_mixing_equals_plain_python_and_the_published_stream() -> None:
    numbers = [0, 1, 2**63, 2**64 - 1, GOLDEN]
    got = mix64(np.array(numbers, dtype=np.uint64))
    assert [int(x) for x in got] == [splitmix64_in_plain_python(x) for x in numbers]
    # First output of SplitMix64 seeded with 0, as in the reference implementation's test vectors.
    assert int(got[-1]) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("seed", [0, 5, 2**31 - 1, 2**64 + 5, -1])
def test_the_seeds_of_rows_are_the_first_numbers_of_the_generator_that_starts_at_the_seed(seed: int) -> None:
    expected = [splitmix64_in_plain_python((seed + (i + 1) * GOLDEN) % 2**64) >> 33 for i in range(64)]
    assert row_seeds(seed, 64) == expected
    assert row_seeds(seed, 7) == expected[:7]
    assert len(set(expected)) == 64
    assert all(type(own) is int and 0 <= own < 2**31 for own in row_seeds(seed, 64))


def test_neighbouring_seeds_share_no_row() -> None:
    seeds = [own for seed in range(1000) for own in row_seeds(seed, ROWS)]
    assert len(set(seeds)) > 9990  # 10,000 draws of 2**31: 0.02 pairs are expected
