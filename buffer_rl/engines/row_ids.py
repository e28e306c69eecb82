"""Requests of several rows: their ids, their seeds, and which of them an abort ends.

A request for several prompts has one ``rid`` R and one ``sampling_seed``. Servers name its rows R_0, R_1, …, and the
rows of an embedded engine draw under seeds that are mixed from the request's seed and the row's number, as below.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

ROWS = 16
"""Most rows of a request. Engines abort by prefix, so an abort of R_1 ends R_10 to R_15 as well: the rows of a request
are aborted together."""
SEED_BITS = 31
"""The widest seed that every engine and every random generator behind one accepts."""
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, SplitMix64's step from one state to the next


class RowSeeds(StrEnum):
    """How the rows of a request draw."""

    OWN = "own"  # each under a seed of its own, mixed as below: the embedded engine
    SHARED = "shared"  # all under the request's, so that rows of equal prompts are equal: SGLang's reproducible mode
    NONE = "none"  # under none, whatever the request says: SGLang otherwise


def row_rid(rid: str, row: int) -> str:
    """The id of row ``row`` of the request ``rid``."""
    return f"{rid}_{row}"


def row_seeds(seed: int, num_rows: int) -> list[int]:
    """The seeds of the rows 0 to ``num_rows - 1`` of a request with ``sampling_seed`` ``seed``; each below 2**31.

    Seed i is the upper 31 bits of number i of the SplitMix64 generator that starts at ``seed``, taken modulo 2**64."""
    states = [(seed + number * GOLDEN) & 0xFFFFFFFFFFFFFFFF for number in range(1, num_rows + 1)]
    seeds: list[int] = (mix64(np.array(states, dtype=np.uint64)) >> np.uint64(64 - SEED_BITS)).tolist()
    return seeds


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
    with the constants of Stafford's variant 13). ``x``: uint64, any shape; overflow wraps."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
