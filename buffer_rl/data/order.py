"""Which row of which source comes next: the order of an epoch, and several sources as one data set, or each with a
share of its own.

All orders are functions of the sizes, the shares and the seeds; their cursors are all that a checkpoint needs.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Any, NamedTuple

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


class Drawn(NamedTuple):
    """The next row of one iterator, and the epoch that it belongs to. passed: it leaves the epoch without being
    leased."""

    row: int
    epoch: int
    passed: bool = False


class Cursor(NamedTuple):
    """Where an order stands: the epoch, and how many rows of it were drawn."""

    epoch: int
    position: int


@dataclass(eq=False)
class EpochIterator:
    """One pass over ``num_rows`` rows after another, each in an order of its own. cursor: where it stands."""

    num_rows: int
    _: KW_ONLY
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        self.seek(Cursor(0, 0))

    @property
    def num_drawn(self) -> int:
        """Rows that were leased since the beginning, over all epochs."""
        return self.cursor.epoch * self.num_rows + self.cursor.position

    def seek(self, cursor: Cursor) -> None:
        """Go on from ``cursor``."""
        self.cursor = cursor
        self._order = epoch_order(self.num_rows, seed=self.seed, epoch=cursor.epoch, shuffle=self.shuffle)

    def next(self) -> Drawn:
        """The next row and its epoch."""
        if self.cursor.position == self.num_rows:
            self.seek(Cursor(self.cursor.epoch + 1, 0))
        epoch, position = self.cursor
        self.cursor = Cursor(epoch, position + 1)
        return Drawn(int(self._order[position]), epoch)


MakeIterator = Callable[..., EpochIterator]
"""Makes an iterator over a number of rows, with a ``seed``."""


class JoinedOrder:
    """Several sources as one data set: an epoch visits every row of every source once, all shuffled together.

    Without shuffling: the first source's rows in file order, then the second's, and so on.
    """

    def __init__(self, make: MakeIterator, sizes: Sequence[int], *, seed: int) -> None:
        *self._firsts, num_rows = itertools.accumulate(sizes, initial=0)
        self.iterators = [make(num_rows, seed=seed)]

    def iterator_of(self, source: int) -> tuple[EpochIterator, int]:
        """The iterator over a source's rows, and its index of the first one."""
        return self.iterators[0], self._firsts[source]

    def next(self) -> tuple[int, Drawn]:
        """The next row in its source, and the source's number."""
        drawn = self.iterators[0].next()
        source = bisect.bisect_right(self._firsts, drawn.row) - 1
        return source, drawn._replace(row=drawn.row - self._firsts[source])


class WeightedOrder:
    """Each source with a share of the groups and with epochs of its own.

    After any number t of groups, source i gave fewer than one group more or less than ``t * weight_i / sum(weights)``:
    which source is next follows R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980), whose
    bound is 1 - 1/(2k - 2) for k sources. A source's epoch visits each of its rows once before its next epoch begins.
    Fractions, not floating point: the choice depends on nothing but the counts.
    """

    def __init__(
        self, make: MakeIterator, sizes: Sequence[int], weights: Sequence[float], *, seeds: Sequence[int]
    ) -> None:
        shares = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(share.denominator for share in shares))
        self._weights = [int(share * scale) for share in shares]
        self._total = sum(self._weights)
        self.iterators = [make(size, seed=seed) for size, seed, _ in zip(sizes, seeds, weights, strict=True)]

    def iterator_of(self, source: int) -> tuple[EpochIterator, int]:
        """The iterator over a source's rows, and its index of the first one."""
        return self.iterators[source], 0

    def next(self) -> tuple[int, Drawn]:
        """The next row in its source, and the source's number."""
        source = self._next_source()
        return source, self.iterators[source].next()

    def _next_source(self) -> int:
        """Of the sources that are behind by 1/(2k - 2) of a group at least, the one whose bound is reached first."""
        counts = [each.num_drawn for each in self.iterators]
        step = sum(counts) + 1
        parts = max(1, 2 * len(counts) - 2)
        # In units of 1 / total.
        behind = [step * weight - count * self._total for weight, count in zip(self._weights, counts, strict=True)]
        due = [source for source, lag in enumerate(behind) if parts * lag >= self._total]
        return min(due, key=lambda i: Fraction(self._total * (parts - 1) - parts * behind[i], parts * self._weights[i]))


RowOrder = JoinedOrder | WeightedOrder
"""An order without end. iterators: over rows, in the order of the sources; their cursors say where it stands."""


def seed_of_source(seed: int, source_hash: str) -> int:
    """A seed of the source's own: sources of equal length must not be visited in the same order."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{source_hash}".encode()).digest()[:8], "big")
