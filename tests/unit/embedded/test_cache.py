"""Slots of key-value memory: what frees leave behind."""

from __future__ import annotations

import random

import torch

from buffer_rl.embedded.cache import CacheShape, Row, SlotPool

SHAPE = CacheShape(
    num_layers=2, num_kv_heads=1, head_dim=1, context_length=8, dtype=torch.float32, device=torch.device("cpu")
)


@torch.inference_mode()
def test_slots_freed_together_are_refilled_by_the_last_live_ones_in_turn_and_cleared():
    for seed in range(200):
        rng = random.Random(seed)
        rows = [Row(length=rng.randrange(1, 8)) for _ in range(rng.randrange(1, 9))]
        pool = SlotPool(SHAPE, 8)
        pool.allocate(rows)
        for number, row in enumerate(rows, start=1):  # entries by which the row and the position are known
            pool.keys[:, row.slot, :, : row.length] = (10.0 * number + torch.arange(row.length))[:, None]
        pool.values += 100.0 * (pool.keys > 0) + pool.keys
        named, live = {id(row): number for number, row in enumerate(rows, start=1)}, [id(row) for row in rows]
        freed = rng.sample(rows, rng.randrange(len(rows) + 1))
        pool.free(freed)
        for row in freed:
            last = live.pop()
            if last != id(row):
                live[live.index(id(row))] = last
        assert [id(row) for row in pool.rows] == live
        assert [row.slot for row in pool.rows] == list(range(len(live)))
        assert all(row.pool is None for row in freed)
        expected = torch.zeros_like(pool.keys)
        for slot, row in enumerate(pool.rows):
            expected[:, slot, :, : row.length] = (10.0 * named[id(row)] + torch.arange(row.length))[:, None]
        assert torch.equal(pool.keys, expected)
        assert torch.equal(pool.values, expected + 100.0 * (expected > 0))
