"""Which row of which source comes next: the order of an epoch, and several sources as one data set, or each with a
share of its own.

All orders are functions of the sizes, the shares and the seeds; their cursors are all that a checkpoint needs.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

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


class NextRow(NamedTuple):
    """The next row: the source's number, the row in it, and the epoch that the row belongs to. passed: it leaves the
    epoch without being leased."""

    source: int
    row: int
    epoch: int
    passed: bool = False


class Drawn(NamedTuple):
    """The next row of one iterator, as ``NextRow``."""

    row: int
    epoch: int
    passed: bool = False


class Cursor(NamedTuple):
    """Where an order stands: the epoch, and how many rows of it were drawn."""

    epoch: int
    position: int


class RowIterator(Protocol):
    """One pass over ``num_rows`` rows after another. cursor: where it stands. num_drawn: rows that were leased since
    the beginning, over all epochs."""

    num_rows: int

    @property
    def cursor(self) -> Cursor: ...
    @property
    def num_drawn(self) -> int: ...
    def seek(self, cursor: Cursor) -> None: ...
    def next(self) -> Drawn: ...


MakeIterator = Callable[[int, int], RowIterator]
"""Makes an iterator over a number of rows, with a seed."""


class EpochIterator:
    """One pass over ``num_rows`` rows after another, each in an order of its own."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self.num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self.seek(Cursor(0, 0))

    @property
    def cursor(self) -> Cursor:
        """Where it stands."""
        return self._cursor

    @property
    def num_drawn(self) -> int:
        """Rows since the beginning, over all epochs."""
        return self._cursor.epoch * self.num_rows + self._cursor.position

    def seek(self, cursor: Cursor) -> None:
        """Go on from ``cursor``."""
        self._cursor = cursor
        self._order: NDArray[np.int64] = epoch_order(
            self.num_rows, seed=self._seed, epoch=cursor.epoch, shuffle=self._shuffle
        )

    def next(self) -> Drawn:
        """The next row and its epoch."""
        if self._cursor.position == self.num_rows:
            self.seek(Cursor(self._cursor.epoch + 1, 0))
        epoch, position = self._cursor
        self._cursor = Cursor(epoch, position + 1)
        return Drawn(int(self._order[position]), epoch)


class _Order:
    """Iterators over rows, in the order of their sources."""

    _epochs: list[RowIterator]

    @property
    def cursors(self) -> list[Cursor]:
        """One for each iterator."""
        return [epochs.cursor for epochs in self._epochs]

    @property
    def lengths(self) -> list[int]:
        """The rows of each iterator."""
        return [epochs.num_rows for epochs in self._epochs]

    def seek(self, cursors: Sequence[Cursor]) -> None:
        for epochs, cursor in zip(self._epochs, cursors, strict=True):
            epochs.seek(cursor)


class JoinedOrder(_Order):
    """Several sources as one data set: an epoch visits every row of every source once, all shuffled together.

    Without shuffling: the first source's rows in file order, then the second's, and so on.
    """

    def __init__(self, sizes: Sequence[int], *, seed: int, shuffle: bool, make: MakeIterator | None = None) -> None:
        self._ends = list(itertools.accumulate(sizes))
        self._epochs = [(make or _epochs(shuffle))(self._ends[-1], seed)]

    def iterator_of(self, source: int) -> tuple[RowIterator, int]:
        """The iterator over a source's rows, and its index of the first one."""
        return self._epochs[0], self._ends[source - 1] if source else 0

    def next(self) -> NextRow:
        """The next row."""
        index, epoch, passed = self._epochs[0].next()
        source = bisect.bisect_right(self._ends, index)
        return NextRow(source, index - (self._ends[source - 1] if source else 0), epoch, passed)


class WeightedOrder(_Order):
    """Each source with a share of the groups and with epochs of its own.

    After any number t of groups, source i gave fewer than one group more or less than ``t * weight_i / sum(weights)``:
    which source is next follows R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980), whose
    bound is 1 - 1/(2k - 2) for k sources. A source's epoch visits each of its rows once before its next epoch begins.
    Fractions, not floating point: the choice depends on nothing but the counts.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        seeds: Sequence[int],
        shuffle: bool,
        make: MakeIterator | None = None,
    ) -> None:
        shares = [Fraction(str(weight)) for weight in weights]
        scale = np.lcm.reduce(np.array([share.denominator for share in shares], dtype=object))
        self._weights = [int(share * int(scale)) for share in shares]
        self._total = sum(self._weights)
        make = make or _epochs(shuffle)
        self._epochs = [make(size, seed) for size, seed in zip(sizes, seeds, strict=True)]
        assert len(self._epochs) == len(self._weights)

    def iterator_of(self, source: int) -> tuple[RowIterator, int]:
        """The iterator over a source's rows, and its index of the first one."""
        return self._epochs[source], 0

    def next(self) -> NextRow:
        """The next row."""
        source = self._next_source()
        return NextRow(source, *self._epochs[source].next())

    def _next_source(self) -> int:
        """Of the sources that are behind by 1/(2k - 2) of a group at least, the one whose bound is reached first."""
        counts = [epochs.num_drawn for epochs in self._epochs]
        step = sum(counts) + 1
        parts = max(1, 2 * len(counts) - 2)
        # In units of 1 / total.
        behind = [step * weight - count * self._total for weight, count in zip(self._weights, counts, strict=True)]
        due = [source for source, lag in enumerate(behind) if parts * lag >= self._total]
        return min(due, key=lambda i: Fraction(self._total * (parts - 1) - parts * behind[i], parts * self._weights[i]))


def _epochs(shuffle: bool) -> MakeIterator:
    return lambda num_rows, seed: EpochIterator(num_rows, seed=seed, shuffle=shuffle)


RowOrder = JoinedOrder | WeightedOrder
"""An order without end. cursors: where it stands; lengths: for each cursor the number of rows of one epoch; seek: go on
from such cursors."""


def seed_of_source(seed: int, source_hash: str) -> int:
    """A seed of the source's own: sources of equal length must not be visited in the same order."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{source_hash}".encode()).digest()[:8], "big")
