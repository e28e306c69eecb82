"""Large payloads in the object store: who owns them, how long they live, and what is said when they are lost."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import ray
from ray._private.internal_api import node_stats

from buffer_rl.buffer.actor import MAX_WAITERS, start_buffer
from buffer_rl.buffer.calls import NumberedCall, answer_of
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.codec import Columns
from buffer_rl.buffer.columns import RowSizes
from buffer_rl.buffer.pool import ReadRequest
from buffer_rl.buffer.state import BufferState
from buffer_rl.buffer.storage import split_payloads, start_storage
from buffer_rl.cluster.calling import blocking
from buffer_rl.errors import BufferStateError, DeadlineError, PayloadLostError, WorkerError
from buffer_rl.options.section import dump_args
from buffer_rl.records.groups import SampleGroup, Ticket
from harness.tickets import close_rollout

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test module

MEGABYTE = 1_000_000


def columns_of(group: SampleGroup) -> Columns:
    """Large tokens and small masks; group ``g`` of the data consists of ``g``."""
    return Columns(
        tokens=[np.full(MEGABYTE // 4, group.uid.row, dtype=np.int32) for _ in group],
        loss_mask=[np.ones(2, dtype=np.float32) for _ in group],
    )


def report_of(ticket: Ticket, group: SampleGroup) -> tuple[Any, ...]:
    """The arguments of ``BufferState.finish``."""
    columns, rows = columns_of(group), [sample.row_id for sample in group]
    return ticket, group.uid, group.attempt, rows, columns, RowSizes.of(columns, len(rows))


class Producer:
    """Finishes groups."""

    def __init__(self, buffer: Any, storage: dict[str, Any]) -> None:
        self._client = BufferClient(buffer, timeout_s=60, caller="producer", storage=storage, min_bytes=MEGABYTE)

    async def pid_and_payload(self) -> tuple[int, Any]:
        """Its process, and a payload that it owns itself."""
        return os.getpid(), ray.put(np.zeros(MEGABYTE, dtype=np.uint8))

    async def finish(self, ticket: Ticket, group: SampleGroup) -> None:
        await self._client.acall(BufferState.finish, *report_of(ticket, group))

    finish_blocking = blocking(finish)

    async def finish_on_the_loop(self, ticket: Ticket, group: SampleGroup) -> None:
        """As a synchronous rollout function does it that an asynchronous one calls."""
        self.finish_blocking(ticket, group)


@contextmanager
def stopped(*actors: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for actor in actors:
            ray.kill(actor)


def start_producer(buffer: Any, storage: dict[str, Any]) -> Any:
    return cast("Any", ray.remote)(num_cpus=0, max_restarts=0)(Producer).remote(buffer, storage)


@contextmanager
def with_storage(args: Any, timeout_s: float = 60) -> Iterator[tuple[Any, dict[str, Any], BufferClient]]:
    """A Buffer, a storage process that waits for it for ``timeout_s``, and a client, until the block ends."""
    buffer = start_buffer(dump_args(args))
    storage = start_storage(1, buffer, timeout_s)
    with stopped(buffer, storage["storage-0"]):
        yield buffer, storage, BufferClient(buffer, timeout_s=60)


def stored_bytes() -> int:
    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return int(stats.store_stats.object_store_bytes_used)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.02)


def is_lost(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=60)
    except ray.exceptions.ObjectLostError:
        return True
    return False


def wait_until_stored(megabytes: int, what: str) -> None:
    """Objects of owners that ended are freed a while later, those of the tests before this one too; and the frames of
    an error that a test caught keep their references until a collection."""
    gc.collect()
    wait_until(lambda: stored_bytes() // MEGABYTE == megabytes, what)


def fill(client: BufferClient, producer: Any, rollout_id: int) -> Ticket:
    ticket = client.call(BufferState.generate, rollout_id)
    client.call(BufferState.open_selection, rollout_id)
    for group in client.call(BufferState.get_samples, ticket, ticket.num_groups):
        ray.get(producer.finish.remote(ticket, group), timeout=60)
    close_rollout(client, ticket)
    return ticket


@pytest.mark.slow
def test_payloads_outlive_their_producer_are_read_without_a_copy_and_are_freed_on_release(
    ray_cluster: None, make_options: Callable[..., Any]
) -> None:
    with with_storage(make_options(n_samples_per_prompt=4)) as (buffer, storage, client):
        for rollout_id, units in enumerate([storage, {}]):
            wait_until_stored(0, "the store is empty at first")
            producer = start_producer(buffer, units)
            pid, lost = ray.get(producer.pid_and_payload.remote(), timeout=60)
            ticket = client.call(BufferState.generate, rollout_id)
            client.call(BufferState.open_selection, rollout_id)
            groups = client.call(BufferState.get_samples, ticket, ticket.num_groups)
            answers = [producer.finish.remote(ticket, group) for group in groups]
            ray.get(answers, timeout=60)
            os.kill(pid, signal.SIGKILL)  # right after its last report was answered
            wait_until(partial(is_lost, lost), "Ray notices the death")
            close_rollout(client, ticket)
            batch = client.get_data(rollout_id)
            assert len(batch) == 3 * 4
            for row_id, tokens in zip(batch.row_ids, batch.columns["tokens"], strict=True):
                assert (tokens.shape, tokens.dtype) == ((MEGABYTE // 4,), np.int32)
                assert (tokens == row_id.uid.row).all()
                assert not tokens.flags.writeable, "a view of the store, shared with every other reader"
            assert sum(mask.sum() for mask in batch.columns["loss_mask"]) == 3 * 4 * 2
            wait_until_stored(12, "12 rows of 1 MB")
            del batch, tokens
            client.call(BufferState.commit, rollout_id, rollout_id + 1)
            client.call(BufferState.release, rollout_id + 1)
            wait_until_stored(0, "the store is as empty as it was")


def test_payloads_of_a_storage_process_that_died_are_a_named_error_and_are_produced_again(
    ray_cluster: None, make_options: Callable[..., Any]
) -> None:
    buffer = start_buffer(dump_args(make_options()))
    storage = start_storage(2, buffer, 30)
    producer = start_producer(buffer, storage)
    with stopped(buffer, producer, storage["storage-0"]):
        client = BufferClient(buffer, timeout_s=60)
        fill(client, producer, 0)
        rows = sorted(row.uid.row for row in client.get_data(0).row_ids)
        ray.kill(storage["storage-1"], no_restart=False)
        caught: list[PayloadLostError] = []

        def is_lost() -> bool:
            try:
                client.get_data(0)
            except PayloadLostError as error:
                caught.append(error)
            return bool(caught)

        wait_until(is_lost, "Ray notices the death")  # until then the payloads of this node can be read
        assert str(caught[0]).startswith("storage-1: a payload is lost: OwnerDiedError")
        client.call(BufferState.abandon, 0)
        fill(client, producer, 0)  # the process that replaces it takes payloads
        assert sorted(row.uid.row for row in client.get_data(0).row_ids) == rows
        client.call(BufferState.commit, 0, 1)
        client.call(BufferState.release, 1)
        ray.kill(storage["storage-1"])  # for good
        ticket = client.call(BufferState.generate, 1)
        client.call(BufferState.open_selection, 1)
        seventh, eighth = client.call(BufferState.get_samples, ticket, 2)
        ray.get(producer.finish.remote(ticket, seventh), timeout=60)
        with pytest.raises(WorkerError, match=r"storage-1.*died"):  # the processes take turns
            ray.get(producer.finish.remote(ticket, eighth), timeout=60)


@pytest.mark.slow
def test_a_blocking_report_from_the_event_loop_goes_to_the_store_too(
    ray_cluster: None, make_options: Callable[..., Any]
) -> None:
    with with_storage(make_options()) as (buffer, storage, client):
        ticket = client.call(BufferState.generate, 0)
        client.call(BufferState.open_selection, 0)
        for number, units in enumerate([storage, {}], start=1):
            producer = start_producer(buffer, units)
            group = client.call(BufferState.get_samples, ticket, 1)[0]
            ray.get(producer.finish_on_the_loop.remote(ticket, group), timeout=60)
            wait_until_stored(4 * number, "the group's 4 rows of 1 MB")
            ray.kill(producer)
        close_rollout(client, ticket)
        batch = client.get_data(0)
        assert [int(row[-1]) for row in batch.columns["tokens"]] == [row_id.uid.row for row_id in batch.row_ids]


@pytest.mark.slow
def test_a_repeated_report_is_recognised_and_a_refused_one_leaves_nothing_in_the_store(
    ray_cluster: None, make_options: Callable[..., Any]
) -> None:
    with with_storage(make_options()) as (buffer, storage, client):
        ticket = client.call(BufferState.generate, 0)
        client.call(BufferState.open_selection, 0)
        wait_until_stored(0, "the store is empty at first")
        for number, owner in enumerate([storage["storage-0"], buffer]):
            sequence = 2 * number
            group = client.call(BufferState.get_samples, ticket, 1)[0]

            def finish(sequence: int, group: SampleGroup = group, owner: Any = owner) -> Any:
                args, payloads = split_payloads(report_of(ticket, group), MEGABYTE)
                assert list(payloads) == ["tokens"]
                call = NumberedCall(sequence, sequence, "finish", args)
                return answer_of(ray.get(owner.execute_with_payloads.remote("by hand", call, payloads), timeout=60))

            assert finish(sequence) is None
            wait_until_stored(4 * (number + 1), "the group's 4 rows of 1 MB")
            assert finish(sequence) is None
            with pytest.raises(BufferStateError, match="refused: it is not leased"):
                finish(sequence + 1)
            assert client.call(BufferState.get_progress)["finished"] == number + 1
            wait_until_stored(4 * (number + 1), "the payloads of the first call alone")


@pytest.mark.slow
def test_a_buffer_that_does_not_answer_is_named_also_where_a_storage_process_asks_it(
    ray_cluster: None, make_options: Callable[..., Any]
) -> None:
    with with_storage(make_options(), timeout_s=1) as (buffer, storage, client):
        producer = start_producer(buffer, storage)
        ticket = client.call(BufferState.generate, 0)
        client.call(BufferState.open_selection, 0)
        group = client.call(BufferState.get_samples, ticket, 1)[0]
        ray.get(storage["storage-0"].ready.remote(), timeout=60)
        pid = ray.get(buffer.get_progress.remote(), timeout=60)["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineError, match="buffer: the Buffer did not answer finish within 1 s"):
                ray.get(producer.finish.remote(ticket, group), timeout=60)
        finally:
            os.kill(pid, signal.SIGCONT)
            ray.kill(producer)


def test_waiting_readers_wake_at_the_change_and_the_buffer_answers_however_many_wait(
    ray_cluster: None, make_options: Callable[..., Any]
) -> None:
    buffer = start_buffer(dump_args(make_options()))
    with stopped(buffer):
        client = BufferClient(buffer, timeout_s=60)
        ticket = client.call(BufferState.generate, 0)
        client.call(BufferState.open_selection, 0)
        group = client.call(BufferState.get_samples, ticket, 1)[0]
        request = ReadRequest(reader="ref", fields=frozenset({"tokens"}), num_rows=8)
        revision = client.call(BufferState.take, ticket.task, request)[0].revision
        waiting = [buffer.wait_change.remote(revision, 600.0) for _ in range(MAX_WAITERS + 16)]
        rows = [sample.row_id for sample in group]
        columns = {"tokens": [np.zeros(3, np.int32) for _ in rows]}
        assert client.call(BufferState.get_progress)["leased"] == 1
        assert ray.wait(waiting, num_returns=1, timeout=0)[0] == []
        client.call(BufferState.finish, ticket, group.uid, group.attempt, rows, columns)
        assert ray.get(waiting, timeout=60) == [None] * len(waiting)  # far below the 600 s that they asked for
        assert client.take(ticket.task, request, 30)[0].row_ids == rows


def test_a_reader_that_waits_for_longer_than_it_may_is_told_what_it_waited_for(
    ray_cluster: None, make_options: Callable[..., Any]
) -> None:
    buffer = start_buffer(dump_args(make_options()))
    with stopped(buffer):
        client = BufferClient(buffer, timeout_s=60)
        ticket = client.call(BufferState.generate, 0)
        client.call(BufferState.open_selection, 0)
        group = client.call(BufferState.get_samples, ticket, 1)[0]
        rows = [sample.row_id for sample in group]
        request = ReadRequest(reader="train", fields=frozenset({"tokens", "ref_log_probs"}), num_rows=8)
        columns = {"tokens": [np.zeros(3, np.int32) for _ in rows]}
        client.call(BufferState.finish, ticket, group.uid, group.attempt, rows, columns)
        with pytest.raises(DeadlineError, match=r"no rows of train_0 were ready for 'train' within 0\.1 s") as caught:
            client.take(ticket.task, request, 0.1)
        assert caught.value.expected == "finished groups with the fields ref_log_probs, tokens"
        client.put_fields(ticket.task, rows, {"ref_log_probs": [np.zeros(2, np.float32) for _ in rows]})
        assert client.take(ticket.task, request, 0.0)[0].row_ids == rows  # what is there needs no wait


def test_a_replica_whose_part_of_a_deal_is_empty_gets_a_batch_without_rows_and_later_the_end(
    ray_cluster: None, make_options: Callable[..., Any]
) -> None:
    buffer = start_buffer(dump_args(make_options()))
    with stopped(buffer):
        client = BufferClient(buffer, timeout_s=60)
        ticket = client.call(BufferState.generate, 0)
        client.call(BufferState.open_selection, 0)
        group = client.call(BufferState.get_samples, ticket, 1)[0]
        rows = [sample.row_id for sample in group]
        request = ReadRequest(reader="train", fields=frozenset({"tokens"}), num_rows=8, num_replicas=2, together=True)
        columns = {"tokens": [np.zeros(3, np.int32) for _ in rows]}
        client.call(BufferState.finish, ticket, group.uid, group.attempt, rows, columns)
        early = client.start_take(ticket.task, request).result()
        assert (early[0].dealt, early[0].ended, early[1]) == (False, False, None)
        close_rollout(client, ticket)
        seen = []
        for replica in (0, 1):
            batches = [
                client.take(ticket.task, replace(request, replica=replica, deal=0), 0.0)[1],
                client.start_take(ticket.task, replace(request, replica=replica, deal=0)).result()[1],
            ]
            seen.append([None if batch is None else batch.row_ids for batch in batches])
            meta, batch = client.take(ticket.task, replace(request, replica=replica, deal=1), 0.0)
            assert (meta.dealt, meta.ended, batch) == (False, True, None)
        assert seen == [[rows, rows], [[], []]]


@pytest.mark.slow
def test_a_reader_that_waits_for_a_pool_that_is_cleared_is_told_at_once(
    ray_cluster: None, make_options: Callable[..., Any]
) -> None:
    buffer = start_buffer(dump_args(make_options()))
    with stopped(buffer):
        client = BufferClient(buffer, timeout_s=60)
        ticket = client.call(BufferState.generate, 0, True)
        request = ReadRequest(reader="ref", fields=frozenset({"tokens"}), num_rows=8)
        told: list[BaseException] = []

        def read() -> None:
            try:
                client.take(ticket.task, request, 600)
            except BufferStateError as error:
                told.append(error)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        client.call(BufferState.clear, ticket.task)
        reader.join(60)
        assert not reader.is_alive(), "the reader still waits"
        assert "it was cleared" in str(told[0])
