"""Time of one operation on a pool that holds more and more rows, and the memory that a row takes. No Ray."""

from __future__ import annotations

import gc
import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from buffer_rl.buffer.columns import Cell, ColumnStore, RowSizes
from buffer_rl.buffer.pool import DataPool, ReadRequest, check_group
from buffer_rl.records.groups import GroupUid, RowId

ROW_COUNTS = (10**3, 10**4, 10**5, 10**6)
GROUP_ROWS = 8
REPEATS = 60  # a pool of 1,000 rows has 125 groups: enough to hand out twice as many
READ = ReadRequest(reader="ref_log_probs", fields=frozenset({"tokens"}), num_rows=GROUP_ROWS)
BLOCKED = ReadRequest(reader="train", fields=frozenset({"tokens", "ref_log_probs"}), num_rows=GROUP_ROWS)


def _measure(num_rows: int) -> dict[str, float]:
    """Median seconds of each operation on a pool of so many rows, and ``bytes per row``."""
    gc.collect()
    before = _resident_bytes()
    store = ColumnStore()
    pool = DataPool(0, "train_0", store, num_rows // GROUP_ROWS)
    pool.get_meta(READ)  # the reader is there from the start, as in a run
    deals = itertools.count()
    groups = num_rows // GROUP_ROWS
    gc.disable()  # nothing here is a cycle; its passes over a growing heap would be timed with whatever triggers them
    for number in range(groups):
        _finish(store, pool, number)
    found = {"bytes per row": (_resident_bytes() - before) / num_rows}
    step = groups // (2 * REPEATS) or 1
    picked = [_rows(number * step % groups) for number in range(2 * REPEATS)]
    fresh = iter(range(groups, groups + REPEATS))
    ones = [np.ones(16, dtype=np.float32) for _ in range(GROUP_ROWS)]
    uneven = iter(picked[::2])
    operations: dict[str, Callable[[], Any]] = {
        "finish": lambda: _finish(store, pool, next(fresh)),
        "put_fields": lambda: pool.put_fields(next(uneven), {"ref_log_probs": ones}),
        "get_meta": lambda: pool.get_meta(replace(READ, deal=next(deals))),
        "plan": _planner(pool, picked),
    }
    for name, operation in operations.items():
        found[name] = _median(operation)
    chosen = [GroupUid("data", number, 0) for number in range(groups)]
    started = time.perf_counter()
    pool.select(chosen)  # the others leave it
    found["close per row"] = (time.perf_counter() - started) / num_rows
    found["get_meta, closed"] = _median(operations["get_meta"])
    number = 0
    while pool.get_meta(replace(BLOCKED, deal=number)).dealt:
        number += 1
    found["get_meta, none"] = _median(lambda: pool.get_meta(replace(BLOCKED, deal=number)))
    found["plan, closed"] = _median(_planner(pool, picked))
    gc.enable()
    return found


def _planner(pool: DataPool, picked: list[list[RowId]]) -> Callable[[], Any]:
    """Plans 32 rows of four groups that lie apart."""
    starts: Iterator[int] = iter(range(REPEATS))

    def plan() -> object:
        start = next(starts)
        rows = [row for number in range(4) for row in picked[(start + 30 * number) % len(picked)]]
        return pool.plan_rows(rows)

    return plan


def _finish(store: ColumnStore, pool: DataPool, number: int) -> None:
    """A group whose tokens are in the object store."""
    cell = Cell(num_rows=GROUP_ROWS, ref=number, storage="buffer")
    sizes = RowSizes(tokens=[300 + number % 100] * GROUP_ROWS, trained=[200.0] * GROUP_ROWS)
    rows = _rows(number)
    check_group(rows[0].uid, rows, {"tokens": cell}, sizes)
    store.put(rows[0].uid, rows, {"tokens": cell}, sizes)
    pool.join(rows[0].uid)


def _rows(number: int) -> list[RowId]:
    uid = GroupUid("data", number, 0)
    return [RowId(uid, index) for index in range(GROUP_ROWS)]


def _median(operation: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        operation()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def print_operations(row_counts: Sequence[int]) -> float:
    """Print the table. Returns the largest ratio of a time at the most rows, the last ones, to that at the first."""
    found = {num_rows: _measure(num_rows) for num_rows in row_counts}
    last = found[row_counts[-1]]
    names = ["finish", "put_fields", "get_meta", "plan", "get_meta, closed", "get_meta, none", "plan, closed"]
    print("Microseconds of one operation (of 8 rows; plan: of 32 rows of four groups), no Ray")
    print(f"{'rows in the pool':>18}" + "".join(f"{name:>18}" for name in names))
    for num_rows, times in found.items():
        print(f"{num_rows:>18,}" + "".join(f"{times[name] * 1e6:>18.1f}" for name in names))
    ratios = {name: last[name] / found[row_counts[0]][name] for name in names}
    print(f"{'last / first':>18}" + "".join(f"{ratios[name]:>18.2f}" for name in names))
    print(f"at {row_counts[-1]:,} rows: {last['bytes per row']:.0f} bytes a row, without payloads; closing takes")
    print(f"{last['close per row'] * 1e6:.1f} microseconds a row, once a rollout")
    return max(ratios.values())
