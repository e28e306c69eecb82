"""Key-value memory of the running sequences: slots in pools of doubling capacity, and shared prompt prefixes.

A pool holds sequences whose key-value entries fit ``capacity`` positions. Live slots are contiguous (the last one
moves into a freed one), so attention reads plain slices. A sequence that outgrows its pool is copied into the next
one, which costs O(1) per token on average and keeps padding below a factor of two. Which pool a sequence is in
follows from its own length alone; deterministic decoding rests on that.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

SMALLEST_POOL = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Sizes of the key-value memory of one model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True, kw_only=True)
class Prefix:
    """A sequence that was run through the model once, for all samples that start with it.

    keys, values: ``[num_layers, num_kv_heads, length, head_dim]``. logits: of the last position,
    ``[padded_vocab]`` float32, which the first token of every sample is drawn from. experts: those that computed its
    tokens, ``[length, layers, top_k]``; None if they are not noted.
    """

    length: int
    keys: torch.Tensor
    values: torch.Tensor
    logits: torch.Tensor
    experts: np.ndarray | None = None


@dataclass(slots=True, kw_only=True)
class Row:
    """One running sequence: ``length`` entries are in memory; ``token``, at position ``length``, is run next. experts:
    those that computed the entries, in parts ``[num_tokens, layers, top_k]``; None if they are not noted. They stay
    when the memory is released, until the sequence joins again."""

    length: int = 0
    token: int = 0
    pool: SlotPool | None = None
    slot: int = -1
    experts: list[np.ndarray] | None = None


class SlotPool:
    """Slots of ``capacity`` positions; the first ``len(rows)`` are live.

    keys, values: ``[num_layers, num_slots, num_kv_heads, capacity, head_dim]``; 0 wherever no live row has an entry.
    Attention reads masked positions too, with a weight of 0, and 0 * NaN is NaN: what a sequence leaves behind must
    not reach the next one in its slot.
    """

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        self.rows: list[Row] = []
        self.in_use = True  # since the last ``drop_empty``
        self.keys = self._empty(0)
        self.values = self._empty(0)

    def _empty(self, num_slots: int) -> torch.Tensor:
        s = self.shape
        return torch.zeros(
            (s.num_layers, num_slots, s.num_kv_heads, self.capacity, s.head_dim), dtype=s.dtype, device=s.device
        )

    @torch.inference_mode()
    def reserve(self, num_rows: int) -> None:
        """Have room for so many rows more."""
        start = len(self.rows)
        needed, have = start + num_rows, self.keys.shape[1]
        self.in_use = True
        if needed > have:
            grown = max(needed, 2 * have, 8)
            for name in ("keys", "values"):
                fresh = self._empty(grown)
                fresh[:, :start] = getattr(self, name)[:, :start]
                setattr(self, name, fresh)

    def allocate(self, rows: Sequence[Row]) -> int:
        """Give ``rows`` the next free slots; returns the first of them."""
        start = len(self.rows)
        self.reserve(len(rows))
        for offset, row in enumerate(rows):
            row.pool, row.slot = self, start + offset
        self.rows.extend(rows)
        return start

    @torch.inference_mode()
    def free(self, rows: Sequence[Row]) -> None:
        """Release the slots of ``rows``, one after another, and clear them; the last live slot moves into each."""
        before, longest = len(self.rows), 0
        moves: dict[int, int] = {}  # slot -> the slot that its entries are in
        for row in rows:
            last = self.rows.pop()
            longest = max(longest, row.length, last.length)
            source = moves.pop(len(self.rows), len(self.rows))
            if last is not row:
                self.rows[row.slot], last.slot = last, row.slot
                moves[row.slot] = source
            row.pool, row.slot = None, -1
        for memory in (self.keys, self.values):
            used = memory[:, :, :, :longest]
            if moves:
                used[:, list(moves)] = used[:, list(moves.values())]
            used[:, len(self.rows) : before] = 0


class SlotCache:
    """All pools of one model."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._pools: dict[int, SlotPool] = {}

    def __len__(self) -> int:
        return sum(len(pool.rows) for pool in self._pools.values())

    @property
    def num_bytes(self) -> int:
        """Memory of all pools, with and without live rows; any thread may ask."""
        return sum(pool.keys.nbytes + pool.values.nbytes for pool in list(self._pools.values()))

    def pools(self) -> Iterator[SlotPool]:
        """Pools with live rows, smallest capacity first; this is the order of rows in a batch."""
        for capacity in sorted(self._pools):
            if self._pools[capacity].rows:
                yield self._pools[capacity]

    def rows(self) -> list[Row]:
        """Live rows in batch order."""
        return [row for pool in self.pools() for row in pool.rows]

    def pool_for(self, length: int) -> SlotPool:
        """The pool of sequences with ``length`` entries, with room for one more."""
        doubled = max(SMALLEST_POOL, 1 << length.bit_length())
        capacity = min(doubled, max(self.shape.context_length, SMALLEST_POOL))
        if capacity not in self._pools:
            self._pools[capacity] = SlotPool(self.shape, capacity)
        return self._pools[capacity]

    def reserve(self, joining: Iterable[tuple[Prefix, int]]) -> None:
        """Have room for so many rows behind each prefix, so that memory grows once for all of them."""
        needed: Counter[SlotPool] = Counter()
        for prefix, num_rows in joining:
            needed[self.pool_for(prefix.length)] += num_rows
        for pool, num_rows in needed.items():
            pool.reserve(num_rows)

    @torch.inference_mode()
    def join(self, prefix: Prefix, rows: Sequence[Row]) -> None:
        """Start ``rows`` behind ``prefix``: one broadcast copy of its entries into their slots."""
        pool = self.pool_for(prefix.length)
        start = pool.allocate(rows)
        end = start + len(rows)
        pool.keys[:, start:end, :, : prefix.length] = prefix.keys[:, None]
        pool.values[:, start:end, :, : prefix.length] = prefix.values[:, None]
        for row in rows:
            row.length = prefix.length
            row.experts = None if prefix.experts is None else [prefix.experts]

    def leave(self, rows: Sequence[Row]) -> None:
        """Release the memory of ``rows``. A row without memory is left alone."""
        for pool in self._pools.values():
            if own := [row for row in rows if row.pool is pool]:
                pool.free(own)

    @torch.inference_mode()
    def promote(self) -> None:
        """Move rows whose pool is full into the next one; called before every step."""
        for source in list(self.pools()):
            full = [row for row in source.rows if row.length >= source.capacity]
            if not full:
                continue
            slots = [row.slot for row in full]
            keys, values = source.keys[:, slots], source.values[:, slots]
            source.free(full)
            target = self.pool_for(source.capacity)
            assert target is not source, "the scheduler admits no sequence beyond the context length"
            start = target.allocate(full)
            target.keys[:, start : start + len(full), :, : source.capacity] = keys
            target.values[:, start : start + len(full), :, : source.capacity] = values

    def drop_empty(self, *, all_of_them: bool) -> None:
        """Give the memory of pools without live rows back; if not of all of them, of those that nothing has used since
        the last call: what each step needs is not freed after each."""
        kept = {size: pool for size, pool in self._pools.items() if pool.rows or (pool.in_use and not all_of_them)}
        for pool in kept.values():
            pool.in_use = bool(pool.rows)
        self._pools = kept


class PrefixCache:
    """Prefixes by token ids: pinned while a waiting request needs them, else kept up to ``max_tokens``, oldest out.

    max_tokens counts the entries of unpinned prefixes.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._entries: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._pins: Counter[tuple[int, ...]] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Memory of all prefixes; any thread may ask."""
        return sum(p.keys.nbytes + p.values.nbytes + p.logits.nbytes for p in list(self._entries.values()))

    def get(self, key: tuple[int, ...]) -> Prefix | None:
        """The prefix of ``key``, marked as recently used."""
        prefix = self._entries.get(key)
        if prefix is not None:
            self._entries.move_to_end(key)
        return prefix

    def put(self, key: tuple[int, ...], prefix: Prefix) -> None:
        """Keep ``prefix``; may evict others that are not pinned."""
        self._entries[key] = prefix
        self._evict()

    def pin(self, key: tuple[int, ...]) -> None:
        """Count one more request that will need ``key``."""
        self._pins[key] += 1

    def unpin(self, key: tuple[int, ...]) -> None:
        """Count one fewer; at zero the prefix may be evicted."""
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            self._evict()

    def drop(self, sequence: tuple[int, ...]) -> None:
        """Forget the prefixes that ``sequence`` begins with; pins stay."""
        for key in [key for key in self._entries if sequence[: len(key)] == key]:
            del self._entries[key]

    def clear(self) -> None:
        """Forget all prefixes (the weights changed, or a flush); pins stay."""
        self._entries.clear()

    def _evict(self) -> None:
        loose = [key for key in self._entries if key not in self._pins]
        total = sum(len(key) for key in loose)
        for key in loose:
            if total <= self.max_tokens:
                return
            total -= len(key)
            del self._entries[key]
