"""In which order an epoch visits the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def epoch_order(num_rows: int, *, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """The rows of one epoch: a permutation of ``0 … num_rows - 1``, ``[num_rows]`` int64.

    It depends on ``(num_rows, seed, epoch)`` alone. Row i draws the i-th 64-bit word of the counter-based
    Philox4x64-10 generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by seed and
    epoch, and rows are sorted by what they drew. Raw words, unlike ``Generator.permutation``, are fixed by the
    algorithm, so that a run resumed under another numpy goes on in the same order.
    """
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    draws: Any = np.random.Philox(key=key).random_raw(num_rows)
    return np.argsort(draws, kind="stable").astype(np.int64)
