"""Payloads from producers to consumers: through the Buffer and Ray's object store, through a plain actor, and plainly
put by one process and read by another."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.actor import start_buffer
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.codec import Columns
from buffer_rl.buffer.columns import RowSizes
from buffer_rl.buffer.pool import ReadRequest
from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.session import ray_session
from buffer_rl.options.section import compose, dump_args

ROWS = 8
"""Rows of a group."""

SIZES = {"1 KB": (10**3, 64), "100 KB": (10**5, 32), "1 MB": (10**6, 16), "10 MB": (10**7, 6), "100 MB": (10**8, 4)}
"""Bytes of one (group, field), and how many of them each producer writes."""

ROUNDS = 5
"""How often each is measured; the median counts."""

JUDGED_SIZE, JUDGED_ROUNDS = "100 MB", 15
"""What the exit status depends on is measured more often, since a machine's speed wanders."""

TIMEOUT_S = 120.0
PLAINLY = "put and get"
"""The way of payloads that die with their producer."""

Found = dict[tuple[str, int], tuple[float, float]]
"""By size and number of producers: seconds of all puts, and of all gets."""


def column_of(num_bytes: int, row: int) -> list[np.ndarray]:
    """``ROWS`` arrays of int64 that have ``num_bytes`` together."""
    return [np.full(num_bytes // ROWS // 8, row, dtype=np.int64) for _ in range(ROWS)]


def read_all(column: Sequence[np.ndarray]) -> int:
    """Reads every byte."""
    return sum(int(row.sum()) for row in column)


def touch_store(actor: Any, num_bytes: int) -> None:
    """Write to every page of ``num_bytes`` of the store, as a process that has run for a while did: its first write to
    a page costs a fault."""
    ray.put(np.zeros(num_bytes, dtype=np.uint8))


class Worker:
    """A producer or a consumer of each kind."""

    def __init__(self, buffer: Any, holder: Any) -> None:
        self._client = BufferClient(buffer, timeout_s=TIMEOUT_S, caller="worker", min_bytes=1 << 20)
        self._holder = holder
        self._work: list[Any] = []
        self._refs: list[Any] = []

    async def prepare(self, num_bytes: int, groups: Sequence[Any]) -> None:
        """Make the columns that are then put."""
        self._work = [(group, column_of(num_bytes, group.uid.row)) for group in groups]

    async def put(self, ticket: Any) -> None:
        """Finish the prepared groups in the Buffer, all at once, as the groups of a rollout are."""
        await asyncio.gather(*(self._finish(ticket, group, column) for group, column in self._work))

    async def _finish(self, ticket: Any, group: Any, column: list[np.ndarray]) -> None:
        rows = [sample.row_id for sample in group]
        columns = Columns(tokens=column)
        sizes = RowSizes.of(columns, len(rows))
        await self._client.acall(BufferState.finish, ticket, group.uid, group.attempt, rows, columns, sizes)

    def get(self, task: str, num_groups: int, replica: int, num_replicas: int) -> int:
        """Read ``num_groups`` groups of the pool, whichever they are, as one of several replicas."""
        request = ReadRequest(
            reader="train", fields=frozenset({"tokens"}), num_rows=ROWS, replica=replica, num_replicas=num_replicas
        )
        total = 0
        for number in range(num_groups):
            _, batch = self._client.take(task, replace(request, deal=number), TIMEOUT_S)
            total += 0 if batch is None else read_all(batch.columns["tokens"])
        return total

    async def put_plain(self) -> None:
        """Hand the prepared columns to the plain actor, all at once."""
        await asyncio.gather(*(self._holder.put.remote(str(group.uid), column) for group, column in self._work))

    def get_plain(self, keys: Sequence[str]) -> int:
        """Read columns of the plain actor."""
        return sum(read_all(ray.get(self._holder.get.remote(key), timeout=TIMEOUT_S)) for key in keys)

    def put_owned(self) -> None:
        """Put the prepared columns; they die with this process."""
        self._refs = [ray.put(column) for _, column in self._work]

    def owned(self) -> list[Any]:
        """The references of what was put, which this process keeps no longer."""
        refs, self._refs = self._refs, []
        return refs

    def get_owned(self, refs: Sequence[Any]) -> int:
        """Read columns that another process put."""
        return sum(read_all(ray.get(ref, timeout=TIMEOUT_S)) for ref in refs)


class Holder:
    """The plain actor: a dictionary of lists."""

    def __init__(self) -> None:
        self._lists: dict[str, list[np.ndarray]] = {}

    def put(self, key: str, column: list[np.ndarray]) -> None:
        """Keep a column."""
        self._lists[key] = column

    def get(self, key: str) -> list[np.ndarray]:
        """The column."""
        return self._lists[key]

    def clear(self) -> None:
        """Forget all."""
        self._lists.clear()


class Bench:
    """The actors of a run; ``producers`` workers put, and as many others get."""

    def __init__(self, folder: Path, max_producers: int) -> None:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import this file
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": "p"}) + "\n" for _ in range(64 * max_producers)))
        args: Any = compose(CORE_SECTIONS)(
            prompt_data=str(path),
            run_dir=str(folder / "run"),
            n_samples_per_prompt=ROWS,
            rollout_batch_size=64 * max_producers,
            rollout_shuffle=False,
        )
        self.buffer = start_buffer(dump_args(args))
        self.client = BufferClient(self.buffer, timeout_s=TIMEOUT_S)
        make = cast("Any", ray.remote)(num_cpus=0, max_restarts=0)
        self.holder = make(Holder).remote()
        self.workers = [make(Worker).remote(self.buffer, self.holder) for _ in range(max_producers + 1)]
        self.ways = {
            "Buffer": self.through_the_buffer,
            "plain actor": self.through_a_plain_actor,
            PLAINLY: self.plainly,
        }
        self._rollouts = 0

    def through_the_buffer(self, num_bytes: int, count: int, producers: int) -> tuple[float, float]:
        """Seconds of all puts, and of all gets."""
        ticket = self.client.call(BufferState.generate, self._rollouts)
        self.client.call(BufferState.open_selection, ticket.rollout_id)
        self._prepare(ticket, num_bytes, count, producers)
        put = timed([worker.put.remote(ticket) for worker in self.workers[:producers]])
        readers = self.workers[1 : producers + 1]
        got = timed([reader.get.remote(ticket.task, count, i, producers) for i, reader in enumerate(readers)])
        self.client.call(BufferState.end_ticket, ticket)
        self.client.call(BufferState.close_selection, ticket.rollout_id)
        self._rollouts += 1
        self.client.call(BufferState.commit, ticket.rollout_id, self._rollouts)
        self.client.call(BufferState.release, self._rollouts)
        return put, got

    def through_a_plain_actor(self, num_bytes: int, count: int, producers: int) -> tuple[float, float]:
        """Seconds of all puts, and of all gets."""
        ticket = self.client.call(BufferState.generate, self._rollouts)
        keys = self._prepare(ticket, num_bytes, count, producers)
        put = timed([worker.put_plain.remote() for worker in self.workers[:producers]])
        readers = self.workers[1 : producers + 1]
        got = timed([reader.get_plain.remote(part) for reader, part in zip(readers, keys, strict=True)])
        ray.get(self.holder.clear.remote(), timeout=TIMEOUT_S)
        self.client.call(BufferState.abandon, ticket.rollout_id)  # nothing of it is in the Buffer
        return put, got

    def plainly(self, num_bytes: int, count: int, producers: int) -> tuple[float, float]:
        """Seconds of all ``ray.put`` of the producers, and of all ``ray.get`` of the consumers."""
        ticket = self.client.call(BufferState.generate, self._rollouts)
        self._prepare(ticket, num_bytes, count, producers)
        put = timed([worker.put_owned.remote() for worker in self.workers[:producers]])
        refs = ray.get([worker.owned.remote() for worker in self.workers[:producers]], timeout=TIMEOUT_S)
        readers = self.workers[1 : producers + 1]
        got = timed([reader.get_owned.remote(part) for reader, part in zip(readers, refs, strict=True)])
        self.client.call(BufferState.abandon, ticket.rollout_id)
        return put, got

    def _prepare(self, ticket: Any, num_bytes: int, count: int, producers: int) -> list[list[str]]:
        keys, calls = [], []
        for worker in self.workers[:producers]:
            groups = self.client.call(BufferState.get_samples, ticket, count)
            calls.append(worker.prepare.remote(num_bytes, groups))
            keys.append([str(group.uid) for group in groups])
        ray.get(calls, timeout=TIMEOUT_S)
        return keys


def timed(calls: Sequence[Any]) -> float:
    """Seconds until all calls have ended, from now: they were sent just before."""
    started = time.perf_counter()
    ray.get(list(calls), timeout=TIMEOUT_S)
    return time.perf_counter() - started


@contextmanager
def bench(max_producers: int, object_store_bytes: int) -> Iterator[Bench]:
    """A local Ray session with the actors, not warmed up."""
    with tempfile.TemporaryDirectory(prefix="pool_bench_") as folder, ray_session(None, None, object_store_bytes):
        yield Bench(Path(folder), max_producers)


def warm_up(actors: Bench, object_store_bytes: int) -> float:
    """Every process has written to the pages that it will use, and has made every kind of call.

    Returns the seconds of two puts of 100 MB before that, in a process that writes to its pages for the first time."""
    for way in actors.ways.values():
        way(10**3, 8, len(actors.workers) - 1)
    newcomer, *others = actors.workers
    share = round(0.8 * object_store_bytes)  # the rest is the store's own
    for actor in (actors.buffer, *others):
        ray.get(actor.__ray_call__.remote(touch_store, share), timeout=TIMEOUT_S)
    cold, _ = actors.through_the_buffer(10**8, 2, 1)
    ray.get(newcomer.__ray_call__.remote(touch_store, share), timeout=TIMEOUT_S)
    for way in actors.ways.values():
        way(10**8, 2, len(actors.workers) - 1)
    return cold


def measure_payloads(
    producers: Sequence[int], object_store_bytes: int, sizes: Sequence[str], judged_rounds: int
) -> tuple[dict[str, Found], float, float]:
    """By way, which take turns, so that all see the same machine. Also, at ``JUDGED_SIZE``, which must be one of
    ``sizes``, the Buffer's share of the rate of ``ray.put`` and ``ray.get`` together, the median over the turns; and
    the seconds of two puts of 100 MB in a process that is not warmed up."""
    judged = JUDGED_SIZE, producers[0]
    found: dict[str, dict[tuple[str, int], list[tuple[float, float]]]] = {}
    with bench(max(producers), object_store_bytes) as actors:
        cold = warm_up(actors, object_store_bytes)
        for size in sizes:
            num_bytes, count = SIZES[size]
            for number in producers:
                for _ in range(judged_rounds if (size, number) == judged else ROUNDS):
                    for name, way in actors.ways.items():
                        rounds = found.setdefault(name, {}).setdefault((size, number), [])
                        rounds.append(way(num_bytes, count, number))
    turns = zip(found[PLAINLY][judged], found["Buffer"][judged], strict=True)
    share = statistics.median(sum(plain) / sum(ours) for plain, ours in turns)
    return {name: medians(rounds) for name, rounds in found.items()}, share, cold


def medians(found: Mapping[tuple[str, int], Sequence[tuple[float, float]]]) -> Found:
    """The median over the rounds, of puts and of gets."""
    return {
        key: (statistics.median(put for put, _ in rounds), statistics.median(got for _, got in rounds))
        for key, rounds in found.items()
    }
