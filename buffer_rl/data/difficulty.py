"""The order of rows by difficulty (``--prompt-order difficulty``): pools of rows by their last mean reward, and an
epoch whose next row is drawn by the weights of the pools.

A row has the weight of its pool, so that a pool is drawn with the probability of its weight times its remaining rows.
Within a pool rows come in the epoch's shuffled order, so that with one pool this is the shuffled epoch. Rows of a pool
of weight 0 are passed over: they leave the epoch without being leased, when the order has reached a later row.

What is next depends on ``(seed, epoch, pools, rows that left the epoch)`` alone, and not on how it came to that. So the
ledger, which knows rewards and rows, is all that a resume needs.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from itertools import accumulate
from typing import NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from buffer_rl.data.order import Cursor, Drawn, EpochIterator
from buffer_rl.errors import BufferStateError, CheckpointError, ConfigError

DEFAULT_WEIGHTS = "0:0.2,mid:1,1:0.1,unseen:1"
NOISE = 1e-6
"""Relative difference of a mean from the lowest or highest reward that counts as rounding."""


class Pool(IntEnum):
    """Where a row is by its last mean reward. LOW: the lowest reward; HIGH: the highest; UNSEEN: no reward is known."""

    LOW = 0
    MID = 1
    HIGH = 2
    UNSEEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWeights:
    """``--difficulty-weights``. low, high: the lowest and the highest reward; weights: relative, by pool, integers.

    Example:
        weights = PoolWeights.parse("-1:0.2,mid:1,1:0.1")
        assert weights.weights == (2, 10, 1, 10)
    """

    low: float
    high: float
    weights: tuple[int, int, int, int]

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Read ``LOW:WEIGHT,mid:WEIGHT,HIGH:WEIGHT,unseen:WEIGHT``; a name that is missing has weight 1. Raises
        ConfigError."""
        shares: dict[str | float, Fraction] = {}
        for part in (text or DEFAULT_WEIGHTS).split(","):
            name, colon, weight = (piece.strip() for piece in part.partition(":"))
            if not colon:
                _refuse(f"{part.strip()!r} is no pool with a weight")
            pool = name if name in ("mid", "unseen") else _bound(name)
            if pool in shares:
                _refuse(f"{name} is named twice")
            shares[pool] = _weight(name, weight)
        rewards = [pool for pool in shares if isinstance(pool, float)]
        if len(rewards) != 2:
            _refuse(f"{len(rewards)} rewards are named in {text!r}, and the lowest and the highest one are needed")
        if shares.get("unseen") == 0:
            _refuse("the weight of unseen is 0, so no row would ever be tried")
        low, high = sorted(rewards)
        by_pool = [shares.get(pool, Fraction(1)) for pool in (low, "mid", high, "unseen")]
        scale = math.lcm(*(share.denominator for share in by_pool))
        first, second, third, fourth = (int(share * scale) for share in by_pool)
        return cls(low=low, high=high, weights=(first, second, third, fourth))

    def pools_of(self, means: NDArray[np.float64]) -> NDArray[np.int8]:
        """The pool of each mean reward, ``[num_rows]``: LOW up to the lowest reward, HIGH from the highest one on."""
        noise = NOISE * max(abs(self.low), abs(self.high))
        pools = np.full(len(means), Pool.MID, dtype=np.int8)
        pools[means <= self.low + noise] = Pool.LOW
        pools[means >= self.high - noise] = Pool.HIGH
        return pools


def _weight(pool: str, text: str) -> Fraction:
    try:
        weight = Fraction(text)
    except (ValueError, ZeroDivisionError):
        _refuse(f"the weight of {pool} is {text!r}")
    return weight if weight >= 0 else _refuse(f"the weight of {pool} is {text}")


def _bound(text: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    return bound if math.isfinite(bound) else _refuse(f"{text!r} is no pool")


def _refuse(what: str) -> NoReturn:
    expected = f"pools with relative weights of 0 or more, such as {DEFAULT_WEIGHTS}"
    hint = "the two numbers are the lowest and the highest reward of a row, such as -1 and 1"
    raise ConfigError(what, where="--difficulty-weights", expected=expected, hint=hint)


@dataclass(eq=False)
class DifficultyIterator(EpochIterator):
    """One pass over ``num_rows`` rows after another, by weights of pools. It takes some 7 bytes a row beyond those of a
    shuffled epoch.

    cursor: the epoch, and how many rows left it. num_drawn: rows that were leased since the beginning, over all epochs.
    After ``seek``, ``take`` must name the rows that left the epoch.
    """

    weights: PoolWeights
    num_drawn: int = 0

    def __post_init__(self) -> None:
        self._pools = np.full(self.num_rows, Pool.UNSEEN, dtype=np.int8)
        self._front = 0  # the largest place in the shuffled order that left the epoch
        super().__post_init__()

    @property
    def taken(self) -> NDArray[np.bool_]:
        """Which rows left the epoch, ``[num_rows]``; a copy."""
        return self._taken.copy()

    def counts(self) -> NDArray[np.int64]:
        """The number of rows in each pool."""
        return np.bincount(self._pools, minlength=len(Pool))

    def seek(self, cursor: Cursor) -> None:
        """Go to an epoch, of which ``take`` names the rows that left it."""
        self._begin(cursor.epoch, np.zeros(self.num_rows, dtype=np.bool_))

    def take(self, rows: Iterable[int], cursor: Cursor) -> None:
        """``rows`` left the epoch before. Raises CheckpointError if these are not as many as ``cursor`` says."""
        taken = np.zeros(self.num_rows, dtype=np.bool_)
        taken[np.fromiter(rows, dtype=np.int64)] = True
        if (number := int(taken.sum())) != cursor.position:
            what = f"the ledger has {number} rows of epoch {cursor.epoch}, and the order is at {cursor.position}"
            raise CheckpointError(what)
        self._begin(cursor.epoch, taken)

    def back_to(self, epoch: int, taken: NDArray[np.bool_], num_drawn: int) -> None:
        """Return to an earlier moment of the order; the pools stay."""
        self.num_drawn = num_drawn
        self._begin(epoch, taken.copy())

    def set_rewards(self, means: Mapping[int, float]) -> None:
        """Move rows to the pools of their mean rewards."""
        rows = np.fromiter(means, dtype=np.int64, count=len(means))
        pools = self.weights.pools_of(np.fromiter(means.values(), dtype=np.float64, count=len(means)))
        moved = rows[self._pools[rows] != pools]
        self._pools[rows] = pools
        if not self._taken[moved].all():  # else they are of the next epoch
            self._sort()

    def next(self) -> Drawn:
        """The next row and its epoch; it may be one that is passed over. Raises BufferStateError, with nothing changed,
        if all rows are in pools of weight 0."""
        if self.cursor.position == self.num_rows:
            if not any(weight and number for weight, number in zip(self.weights.weights, self.counts(), strict=True)):
                what = f"all {self.num_rows} rows are in pools of weight 0, so there is nothing to train on"
                where = "--difficulty-weights"
                raise BufferStateError(what, where=where, hint="a small weight keeps a pool in the epochs")
            self.seek(Cursor(self.cursor.epoch + 1, 0))
        left = [len(ranks) - start for ranks, start in zip(self._ranks, self._starts, strict=True)]
        shares = [weight * number for weight, number in zip(self.weights.weights, left, strict=True)]
        total = sum(shares)
        if (passed := self._passed(left, is_end=total == 0)) is not None:
            return self._leave(passed, passed=True)
        self.num_drawn += 1
        return self._leave(bisect.bisect_right(list(accumulate(shares)), self._point(total)), passed=False)

    def _passed(self, left: list[int], *, is_end: bool) -> int | None:
        """The pool of weight 0 whose first row is before the latest one that left, or is there at the epoch's end."""
        unwanted = [pool for pool, weight in enumerate(self.weights.weights) if not weight and left[pool]]
        firsts = ((pool, self._ranks[pool][self._starts[pool]]) for pool in unwanted)
        return next((pool for pool, first in firsts if is_end or first < self._front), None)

    def _point(self, total: int) -> int:
        """A number from 0 to ``total - 1``, by the position."""
        text = f"difficulty:{self.seed}:{self.cursor.epoch}:{self.cursor.position}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big") % total

    def _leave(self, pool: int, *, passed: bool) -> Drawn:
        rank = int(self._ranks[pool][self._starts[pool]])
        row = int(self._order[rank])
        self._front = max(self._front, rank)
        self._starts[pool] += 1
        self._taken[row] = True
        epoch, position = self.cursor
        self.cursor = Cursor(epoch, position + 1)
        return Drawn(row, epoch, passed)

    def _begin(self, epoch: int, taken: NDArray[np.bool_]) -> None:
        super().seek(Cursor(epoch, int(taken.sum())))
        self._taken = taken
        self._sort()

    def _sort(self) -> None:
        """Each pool's remaining rows, by their places in the epoch's shuffled order."""
        left = ~self._taken[self._order]
        pools = self._pools[self._order]
        self._ranks = [np.flatnonzero(left & (pools == pool)).astype(np.uint32) for pool in Pool]
        self._starts = [0] * len(Pool)
        gone = np.flatnonzero(~left)
        self._front = int(gone[-1]) if len(gone) else 0
