"""The payloads of ``pool_payloads.py`` through the TransferQueue package, in an interpreter that has it.

Called by ``pool.py --transfer-queue-python PATH``, with sizes and producers as JSON. Prints one JSON line of
``[size, producers, seconds of all puts, seconds of all gets]`` for each measurement. It imports nothing of buffer_rl.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
import transfer_queue
from tensordict import TensorDict

TIMEOUT_S = 120.0
PARTITION = "train"


class Worker:
    """A producer or a consumer. A group is ``rows`` keys with one field each."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        transfer_queue.init()
        self._work: list[Any] = []

    def prepare(self, num_bytes: int, rows: int, groups: Sequence[str]) -> None:
        """Make the fields that are then put."""
        shape = (rows, num_bytes // rows // 8)
        fields = [TensorDict({"tokens": torch.ones(shape, dtype=torch.int64)}, batch_size=rows) for _ in groups]
        self._work = [(keys_of(group, rows), field) for group, field in zip(groups, fields, strict=True)]

    def put(self) -> None:
        """Put the prepared groups, all at once."""
        asyncio.run(put_all(self._work))

    def get(self, rows: int, groups: Sequence[str]) -> int:
        """Read every byte of groups."""
        total = 0
        for group in groups:
            found = transfer_queue.kv_batch_get(
                keys=keys_of(group, rows), partition_id=PARTITION, select_fields="tokens"
            )
            total += sum(int(row.sum()) for row in found["tokens"])
        return total


async def put_all(work: Sequence[tuple[list[str], TensorDict]]) -> None:
    """Put groups at once. A function, because Ray makes an actor with a coroutine another kind of actor."""
    put = transfer_queue.async_kv_batch_put
    await asyncio.gather(*(put(keys=keys, partition_id=PARTITION, fields=fields) for keys, fields in work))


def keys_of(group: str, rows: int) -> list[str]:
    """The keys of a group's rows."""
    return [f"{group}/{row}" for row in range(rows)]


def timed(calls: Sequence[Any]) -> float:
    """Seconds until all calls have ended."""
    started = time.perf_counter()
    ray.get(list(calls), timeout=TIMEOUT_S)
    return time.perf_counter() - started


def measure(workers: Sequence[Any], num_bytes: int, count: int, rows: int, producers: int) -> tuple[float, float]:
    """Seconds of all puts, and of all gets."""
    groups = [[f"{producer}-{index}" for index in range(count)] for producer in range(producers)]
    pairs = list(zip(workers[:producers], groups, strict=True))
    ray.get([worker.prepare.remote(num_bytes, rows, part) for worker, part in pairs], timeout=TIMEOUT_S)
    put = timed([worker.put.remote() for worker in workers[:producers]])
    readers = zip(workers[1 : producers + 1], groups, strict=True)
    got = timed([reader.get.remote(rows, part) for reader, part in readers])
    keys = [key for part in groups for group in part for key in keys_of(group, rows)]
    transfer_queue.kv_clear(keys=keys, partition_id=PARTITION)
    return put, got


def main() -> int:
    """Measure what the first argument names; 0."""
    wanted = json.loads(sys.argv[1])
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        object_store_memory=wanted["object_store_bytes"],
        num_cpus=16,  # its actors ask for one each; those of the other ways ask for none
    )
    transfer_queue.init()
    make = ray.remote(num_cpus=0)(Worker)
    workers = [make.remote() for _ in range(max(wanted["producers"]) + 1)]
    measure(workers, 10**6, 2, wanted["rows"], max(wanted["producers"]))  # warms up
    for size, (num_bytes, count) in wanted["sizes"].items():
        for producers in wanted["producers"]:
            found = [measure(workers, num_bytes, count, wanted["rows"], producers) for _ in range(wanted["rounds"])]
            put, got = (statistics.median(seconds) for seconds in zip(*found, strict=True))
            print(json.dumps([size, producers, put, got]), flush=True)
    transfer_queue.close()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
