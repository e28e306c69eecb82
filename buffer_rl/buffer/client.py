"""The Buffer as its callers see it: typed methods, deadlines, and a sequence number on every change.

``BufferClient`` serves the driver and the trainer ranks; ``RolloutClient`` is the ``buffer`` that a rollout
function receives.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import ray

from buffer_rl.buffer.calling import Answers
from buffer_rl.buffer.calls import OpenCalls
from buffer_rl.buffer.cells import BatchPlan, Cell, RowSizes, assemble
from buffer_rl.buffer.partial import check_versions
from buffer_rl.buffer.partition import Splitting
from buffer_rl.buffer.pool import ReadRequest, RowsMeta
from buffer_rl.buffer.wire import Columns
from buffer_rl.data.delivery import Delivery, DeliveryNeeded, DeliveryRequest
from buffer_rl.errors import DeadlineError, PayloadLostError
from buffer_rl.types import Column, GroupUid, QueueHeader, RolloutReport, RowId, SampleGroup, Ticket, TrainBatch

WAIT_SLICE_S = 5.0
"""Longest single wait for ready rows: a reader that waits longer asks again, so a Buffer that died is noticed."""


class BufferClient:
    """Calls one Buffer actor. Safe to use from several threads; each process makes its own.

    A call that the Buffer's death interrupts is made again, with the same number, on the Buffer that replaces it.

    Raises DeadlineError where the Buffer does not answer within ``timeout_s``, and whatever error of
    ``buffer_rl.errors`` the Buffer raised.
    """

    def __init__(self, actor: Any, *, timeout_s: float, caller: str = "") -> None:
        self.actor = actor
        self._answers = Answers(who="the Buffer", role="buffer", timeout_s=timeout_s, flag="--buffer-timeout-s")
        self._caller = f"{caller or 'client'}-{uuid.uuid4().hex}"
        self._calls = OpenCalls()

    def change(self, method: str, *args: Any) -> Any:
        """Call a method that changes state, and wait for its answer."""
        with self._calls.numbered() as (sequence, open_from):
            ask = partial(self.actor.change.remote, self._caller, sequence, open_from, method, *args)
            return self._answers.wait(method, ask)

    async def achange(self, method: str, *args: Any) -> Any:
        """``change`` for an event loop."""
        with self._calls.numbered() as (sequence, open_from):
            ask = partial(self.actor.change.remote, self._caller, sequence, open_from, method, *args)
            return await self._answers.until(method, ask)

    def read(self, method: str, *args: Any) -> Any:
        """Call a method whose repeat changes nothing, and wait for its answer."""
        return self._answers.wait(method, partial(self.actor.read.remote, method, *args))

    async def aread(self, method: str, *args: Any) -> Any:
        """``read`` for an event loop."""
        return await self._answers.until(method, partial(self.actor.read.remote, method, *args))

    # -- the driver's and the trainer's methods ------------------------------------------------------

    def generate(self, rollout_id: int, evaluation: bool = False) -> Ticket:
        """Open a rollout; see ``BufferState.generate``."""
        return self.change("generate", rollout_id, evaluation)  # type: ignore[no-any-return]

    def close_rollout(self, ticket: Ticket) -> RolloutReport:
        """Select the step's groups; see ``BufferState.close_rollout``."""
        return self.change("close_rollout", ticket)  # type: ignore[no-any-return]

    def adopt(self, ticket: Ticket, row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> None:
        """Take groups over that were finished elsewhere; see ``BufferState.adopt``."""
        self.change("adopt", ticket, list(row_ids), Columns(columns))

    def get_data(
        self,
        rollout_id: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_steps: int = 1,
        step: int = 0,
        splitting: Splitting = Splitting.ROWS,
    ) -> TrainBatch:
        """One rank's share of mini-batch ``step`` of ``num_steps``; see ``DataPool.share``."""
        return self._assembled(self.read("plan_data", rollout_id, dp_rank, dp_size, num_steps, step, splitting))

    def get_eval_data(self, rollout_id: int) -> TrainBatch:
        """All rows of an evaluation."""
        return self._assembled(self.read("plan_eval_data", rollout_id))

    def get_totals(self, rollout_id: int) -> tuple[int, int]:
        """Rows and unmasked response tokens that the step trains on, over all ranks."""
        return self.read("get_totals", rollout_id)  # type: ignore[no-any-return]

    def put_fields(
        self,
        task: str,
        row_ids: Sequence[RowId],
        columns: Mapping[str, Column],
        reader: str | None = None,
        generation: int = 0,
    ) -> None:
        """Add derived fields to rows of a task; see ``DataPool.put_fields``."""
        self.change("put_fields", task, list(row_ids), Columns(columns), reader, generation)

    def get_meta(self, task: str, request: ReadRequest, timeout_s: float) -> RowsMeta:
        """Rows for a reading task as soon as there are any, or the end (see ``DataPool.get_meta``).

        Raises DeadlineError, naming the task and the fields, where nothing comes within ``timeout_s``."""
        return self._once_ready(task, request, timeout_s, lambda: (self.change("get_meta", task, request), None))[0]

    def take(
        self, task: str, request: ReadRequest, timeout_s: float, fields: Sequence[str] | None = None
    ) -> tuple[RowsMeta, TrainBatch | None]:
        """``get_meta``, and ``get_fields`` of these rows, in one call; None at the end."""
        ask = partial(self.change, "take", task, request, None if fields is None else list(fields))
        meta, plan = self._once_ready(task, request, timeout_s, ask)
        return meta, None if plan is None else self._assembled(plan)

    def _once_ready(
        self, task: str, request: ReadRequest, timeout_s: float, take: Callable[[], tuple[RowsMeta, BatchPlan | None]]
    ) -> tuple[RowsMeta, BatchPlan | None]:
        """The answer of ``take`` that has rows or is the end. Raises DeadlineError."""
        deadline = time.monotonic() + timeout_s
        while True:
            meta, plan = take()
            if meta.row_ids or meta.ended:
                return meta, plan
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"no rows of {task} were ready for {request.reader!r} within {timeout_s:g} s",
                    where="buffer",
                    expected=f"finished groups with the fields {', '.join(sorted(request.fields))}",
                )
            slice_s = min(left, WAIT_SLICE_S, self._answers.timeout_s / 2)
            ask = partial(self.actor.wait_change.remote, meta.revision, slice_s)
            self._answers.wait("wait_change", ask)

    def get_fields(self, task: str, row_ids: Sequence[RowId], fields: Sequence[str] | None = None) -> TrainBatch:
        """Rows of a task with ``fields``, or with all that they have."""
        return self._assembled(self.read("plan_fields", task, list(row_ids), fields))

    def offer_again(self, task: str, reader: str) -> int:
        """A reading task's process is replaced; see ``DataPool.offer_again``."""
        return self.change("offer_again", task, reader)  # type: ignore[no-any-return]

    def abandon(self, rollout_id: int) -> None:
        """Give up a rollout that is not trained on; see ``BufferState.abandon``."""
        self.change("abandon", rollout_id)

    def clear(self, task: str) -> None:
        """Forget a task and its payloads."""
        self.change("clear", task)

    def commit(self, rollout_id: int, step: int) -> None:
        """Mark a rollout's groups as trained."""
        self.change("commit", rollout_id, step)

    def release(self, version: int) -> None:
        """Free what was trained before ``version``, which is published."""
        self.change("release", version)

    def save(self, folder: str) -> None:
        """Write the Buffer's state into ``folder``."""
        self.read("save", folder)

    def load(self, folder: str) -> None:
        """Continue from the state in ``folder``."""
        self.change("load", folder)

    def get_num_rollout_per_epoch(self) -> int:
        """Steps that one pass over the data takes."""
        return self.read("get_num_rollout_per_epoch")  # type: ignore[no-any-return]

    def set_source_length(self, num_rows: int) -> None:
        """Tell the length of the user's data source, which runs elsewhere."""
        self.change("set_source_length", num_rows)

    def get_source_state(self) -> tuple[int, bytes]:
        """The number of the next batch of the user's data source, and its state before it."""
        return self.read("get_source_state")  # type: ignore[no-any-return]

    def get_progress(self) -> dict[str, Any]:
        """Counts for a display."""
        return self._answers.wait("get_progress", self.actor.get_progress.remote)  # type: ignore[no-any-return]

    def _assembled(self, plan: BatchPlan) -> TrainBatch:
        return assemble(plan, self._resolve)

    def _resolve(self, cells: Sequence[Cell]) -> Sequence[Column]:
        """Payloads from the object store, without a copy where they are on this machine."""
        timeout_s = self._answers.timeout_s
        try:
            return ray.get([cell.ref for cell in cells], timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(
                f"{len(cells)} payloads did not arrive within {timeout_s:g} s",
                where=", ".join(sorted({cell.storage for cell in cells})),
                hint=f"raise {self._answers.flag} if the network or a full object store's disk is only slow",
            ) from error
        except ray.exceptions.ObjectLostError as error:
            lost = [cell.storage for cell in cells if cell.ref.hex() == error.object_ref_hex]
            raise PayloadLostError(
                f"a payload is lost: {type(error).__name__}",
                where=", ".join(lost or sorted({cell.storage for cell in cells})),
                expected="a storage process, and the node with the payload, that live as long as the rollout",
            ) from error
        except ray.exceptions.RayError as error:
            raise self._answers.named("get_fields", error) from error


class GroupEncoder(Protocol):
    """Turns a group that user code filled into rows and columns."""

    def encode(self, group: SampleGroup, evaluation: bool) -> tuple[list[RowId], dict[str, Column]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedGroup:
    """One group's rows and columns, ready to be reported."""

    row_ids: list[RowId]
    columns: dict[str, Column]
    sizes: RowSizes


ChooseQueued = Callable[[list[QueueHeader], int], list[GroupUid]]
"""A buffer filter: of the queue's headers, which groups to lease next, in order."""


class BatchSource(Protocol):
    """A data source that runs in a process of its own: batches by number (see ``CustomSource.take``)."""

    def take(self, request: DeliveryRequest) -> Delivery | None: ...
    async def atake(self, request: DeliveryRequest) -> Delivery | None: ...


class PayloadStore(Protocol):
    """Puts the large columns of a group into the object store (see ``buffer_rl.buffer.storage.client``)."""

    def store(self, columns: Mapping[str, Column]) -> Mapping[str, Column | Cell]: ...
    async def astore(self, columns: Mapping[str, Column]) -> Mapping[str, Column | Cell]: ...


class RolloutClient:
    """The ``buffer`` of one rollout (see ``buffer_rl.contracts.RolloutBuffer``).

    source: where the batches come from that the Buffer asks for, if it does not read its data itself.
    storage: where large columns go; without it they travel inside the report.
    """

    def __init__(
        self,
        client: BufferClient,
        ticket: Ticket,
        encoder: GroupEncoder,
        choose: ChooseQueued | None = None,
        source: BatchSource | None = None,
        storage: PayloadStore | None = None,
    ) -> None:
        self._client = client
        self._ticket = ticket
        self._encoder = encoder
        self._choose = None if ticket.evaluation else choose
        self._source = source
        self._storage = storage
        self.finished: dict[GroupUid, SampleGroup] = {}

    @property
    def ticket(self) -> Ticket:
        """The rollout that this buffer works for."""
        return self._ticket

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """Lease groups; the queued ones that the buffer filter chooses come first."""
        chosen = None
        if self._choose is not None and (headers := self._client.read("get_headers")):
            chosen = self._choose(headers, num_samples)
        while True:  # each round hands a batch in, and batches are not empty
            try:
                groups: list[SampleGroup] = self._client.change("get_samples", self._ticket, num_samples, chosen)
                return groups
            except DeliveryNeeded as needed:
                delivery = self._deliverer(needed).take(needed.request)
                if delivery is not None:
                    self._client.change("deliver", delivery)

    async def aget_samples(self, num_samples: int) -> list[SampleGroup]:
        """Lease groups; the queued ones that the buffer filter chooses come first."""
        chosen = None
        if self._choose is not None and (headers := await self._client.aread("get_headers")):
            chosen = await asyncio.to_thread(self._choose, headers, num_samples)
        while True:
            try:
                groups: list[SampleGroup] = await self._client.achange("get_samples", self._ticket, num_samples, chosen)
                return groups
            except DeliveryNeeded as needed:
                delivery = await self._deliverer(needed).atake(needed.request)
                if delivery is not None:
                    await self._client.achange("deliver", delivery)

    def add_samples(self, groups: Sequence[SampleGroup]) -> None:
        """Give leased groups back."""
        self._client.change("add_samples", *self._given_back(groups))

    async def aadd_samples(self, groups: Sequence[SampleGroup]) -> None:
        """Give leased groups back."""
        await self._client.achange("add_samples", *self._given_back(groups))

    def encode(self, group: SampleGroup) -> EncodedGroup:
        """The group as the Buffer stores it. Raises RolloutError for one that cannot be trained on."""
        check_versions(self._ticket, group)
        row_ids, columns = self._encoder.encode(group, self._ticket.evaluation)
        return EncodedGroup(row_ids=row_ids, columns=columns, sizes=RowSizes.of(columns, len(row_ids)))

    def finish(self, group: SampleGroup, encoded: EncodedGroup | None = None) -> None:
        """Report a finished group."""
        rows = encoded or self.encode(group)
        stored = Columns(rows.columns if self._storage is None else self._storage.store(rows.columns))
        self._client.change("finish", self._ticket, group.uid, group.attempt, rows.row_ids, stored, rows.sizes)
        self.finished[group.uid] = group

    async def afinish(self, group: SampleGroup, encoded: EncodedGroup | None = None) -> None:
        """Report a finished group."""
        rows = encoded or self.encode(group)
        stored = Columns(rows.columns if self._storage is None else await self._storage.astore(rows.columns))
        await self._client.achange("finish", self._ticket, group.uid, group.attempt, rows.row_ids, stored, rows.sizes)
        self.finished[group.uid] = group

    def reject(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group."""
        self._client.change("reject", self._ticket, group.uid, group.attempt, reason)

    async def areject(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group."""
        await self._client.achange("reject", self._ticket, group.uid, group.attempt, reason)

    def quarantine(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group for good."""
        self._client.change("quarantine", self._ticket, group.uid, group.attempt, reason)

    async def aquarantine(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group for good."""
        await self._client.achange("quarantine", self._ticket, group.uid, group.attempt, reason)

    def count_failure(self, group: SampleGroup, kind: str) -> tuple[int, int]:
        """Count a failed attempt; returns how many of this kind the run had, and how many of them the group."""
        return self._client.change("count_failure", self._ticket, group.uid, kind)  # type: ignore[no-any-return]

    async def acount_failure(self, group: SampleGroup, kind: str) -> tuple[int, int]:
        """Count a failed attempt; returns how many of this kind the run had, and how many of them the group."""
        return await self._client.achange(  # type: ignore[no-any-return]
            "count_failure", self._ticket, group.uid, kind
        )

    def get_buffer_length(self) -> int:
        """Number of groups in the queue."""
        return self._client.read("get_buffer_length")  # type: ignore[no-any-return]

    async def aget_buffer_length(self) -> int:
        """Number of groups in the queue."""
        return await self._client.aread("get_buffer_length")  # type: ignore[no-any-return]

    def get_metadata(self) -> dict[str, Any]:
        """The user's notes."""
        return self._client.read("get_metadata")  # type: ignore[no-any-return]

    async def aget_metadata(self) -> dict[str, Any]:
        """The user's notes."""
        return await self._client.aread("get_metadata")  # type: ignore[no-any-return]

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge JSON values into the notes."""
        self._client.change("update_metadata", dict(metadata))

    async def aupdate_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge JSON values into the notes."""
        await self._client.achange("update_metadata", dict(metadata))

    def _deliverer(self, needed: DeliveryNeeded) -> BatchSource:
        if self._source is None:
            raise needed
        return self._source

    def _given_back(self, groups: Sequence[SampleGroup]) -> tuple[Any, ...]:
        leases = [(group.uid, group.attempt) for group in groups]
        return self._ticket, leases, list(groups) if self._ticket.keeps_tokens else ()
