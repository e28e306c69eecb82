"""The Buffer as its callers see it: typed methods, deadlines, and a sequence number on every change."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, cast
from weakref import WeakKeyDictionary

import ray

from buffer_rl.buffer.actor import BufferActor
from buffer_rl.buffer.calls import NumberedCall, OpenCalls, Sending, StartedCall, answer_of, changes_state
from buffer_rl.buffer.codec import Columns, RowIds
from buffer_rl.buffer.columns import BatchPlan, Cell, assemble
from buffer_rl.buffer.pool import ReadRequest, RowsMeta, Writer
from buffer_rl.buffer.readers import ALL_ROWS, Share
from buffer_rl.buffer.state import BufferState
from buffer_rl.buffer.storage import split_payloads
from buffer_rl.cluster.calling import Answers, JoinedCalls
from buffer_rl.errors import DeadlineError, PayloadLostError
from buffer_rl.records.groups import Column, RolloutReport, RowId, Ticket, TrainBatch

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

WAIT_SLICE_S = 5.0
"""Longest single wait for ready rows: a reader that waits longer asks again, so a Buffer that died is noticed."""


class BufferClient:
    """Calls one Buffer actor. Safe to use from several threads; each process makes its own.

    A call that the Buffer's death interrupts is made again, with the same number, on the Buffer that replaces it.

    min_bytes: columns of this size, in calls that are waited for, go into the object store. storage: the processes
    that own them, by name, in turn; the Buffer itself where there are none.

    Raises DeadlineError where the Buffer does not answer within ``timeout_s``, and whatever error of
    ``buffer_rl.errors`` the Buffer raised.
    """

    def __init__(
        self,
        actor: Any,
        *,
        timeout_s: float,
        caller: str = "",
        storage: Mapping[str, Any] = {},
        min_bytes: float = math.inf,
    ) -> None:
        self.actor = actor
        self._answers = Answers(who="the Buffer", role="buffer", timeout_s=timeout_s, flag="--buffer-timeout-s")
        # A storage process waits for the Buffer for as long; its own answer, which says so, comes later.
        units = [
            (unit, replace(self._answers, who=name, role=name, timeout_s=2 * timeout_s))
            for name, unit in storage.items()
        ]
        self._owners = itertools.cycle(units or [(actor, self._answers)])
        self._min_bytes = min_bytes
        self._caller = f"{caller or 'client'}-{uuid.uuid4().hex}"
        self._calls = OpenCalls()
        self._joined: WeakKeyDictionary[asyncio.AbstractEventLoop, JoinedCalls[Any]] = WeakKeyDictionary()

    def start(self, operation: Callable[[Any, *Ts], R], *args: *Ts) -> StartedCall[R]:
        """Call an operation of the Buffer, such as ``BufferState.finish``, without waiting. Calls are executed in the
        order in which they are made, but for those that a restart of the Buffer interrupts: they are made again when
        their answer is waited for."""
        return StartedCall(operation.__name__, self._prepared(operation, args))

    def call(self, operation: Callable[[Any, *Ts], R], *args: *Ts) -> R:
        """``start``, and wait for the answer."""
        return self.start(operation, *args).result()

    async def acall(self, operation: Callable[[Any, *Ts], R], *args: *Ts) -> R:
        """``call`` for an event loop, which sends calls together that are made at one time."""
        with self._prepared(operation, args) as (answers, send, call):
            if call is None:
                return cast("R", answer_of(await answers.until(operation.__name__, send)))
            loop = asyncio.get_running_loop()
            return cast("R", await self._joined.setdefault(loop, JoinedCalls(self._send_all)).make(call))

    async def _send_all(self, calls: list[NumberedCall]) -> list[Any]:
        names = ", ".join(sorted({call.method for call in calls}))
        send = partial(self.actor.execute.remote, self._caller, calls)
        return cast("list[Any]", await self._answers.until(names, send))

    @contextmanager
    def _prepared(self, operation: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[Sending]:
        """What sends the call, as often as need be, and what waits for its answer, inside the block; and the call, if
        it may travel with others."""
        kept, payloads = split_payloads(args, self._min_bytes)
        with self._calls.numbered() if changes_state(operation) else nullcontext((-1, -1)) as number:
            call = NumberedCall(*number, operation.__name__, kept)
            if payloads:
                owner, answers = next(self._owners)
                yield answers, partial(owner.execute_with_payloads.remote, self._caller, call, payloads), None
            else:
                yield self._answers, partial(self.actor.execute.remote, self._caller, [call]), call

    def import_groups(self, ticket: Ticket, row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> None:
        """Take groups over that were finished elsewhere; see ``BufferState.import_groups``."""
        self.call(BufferState.import_groups, ticket, RowIds(row_ids), Columns(columns))

    def get_data(self, rollout_id: int, share: Share = ALL_ROWS) -> TrainBatch:
        """The rows of a closed rollout, or one rank's share of them; see ``DataPool.share``."""
        return assemble(self.call(BufferState.plan_data, rollout_id, share), self._resolve)

    def put_fields(
        self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column], writer: Writer | None = None
    ) -> None:
        """Add derived fields to rows of a task; see ``DataPool.put_fields``."""
        self.start_put_fields(task, row_ids, columns, writer).result()

    def start_put_fields(
        self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column], writer: Writer | None = None
    ) -> StartedCall[None]:
        """``put_fields`` without waiting."""
        return self.start(BufferState.put_fields, task, RowIds(row_ids), Columns(columns), writer)

    def take(self, task: str, request: ReadRequest, timeout_s: float) -> tuple[RowsMeta, TrainBatch | None]:
        """The deal that a reading task asks for, once it is made, with all fields that its rows have: a batch, of no
        rows where the deal has none; None at the end (see ``DataPool.get_meta``).

        Raises DeadlineError, naming the task and the fields, where nothing comes within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            meta, plan = self.call(BufferState.take, task, request)
            if meta.dealt or meta.ended:
                return self._taken((meta, plan))
            if (left := deadline - time.monotonic()) <= 0:
                what = f"no rows of {task} were ready for {request.reader!r} within {timeout_s:g} s"
                expected = f"finished groups with the fields {', '.join(sorted(request.fields))}"
                raise DeadlineError(what, where="buffer", expected=expected)
            self._wait_change(meta.revision, left)

    def await_selection(self, rollout_id: int, last_ticket: int) -> RolloutReport:
        """``close_selection`` once the groups of the step are finished. The caller has the deadline: it knows whether
        production moves."""
        while True:
            report, revision = self.call(BufferState.close_selection, rollout_id, last_ticket)
            if report is not None:
                return report
            self._wait_change(revision, WAIT_SLICE_S)

    def _wait_change(self, revision: int, timeout_s: float) -> None:
        """Wait until the Buffer has changed since ``revision``, or less long."""
        slice_s = min(timeout_s, WAIT_SLICE_S, self._answers.timeout_s / 2)
        self._answers.call(self.actor, BufferActor.wait_change, revision, slice_s)  # type: ignore[arg-type]

    def start_take(self, task: str, request: ReadRequest) -> StartedCall[tuple[RowsMeta, TrainBatch | None]]:
        """``take`` without waiting for the answer, nor for rows: the batch is None where the deal is not made yet."""
        return self.start(BufferState.take, task, request).then(self._taken)

    def _taken(self, answer: tuple[RowsMeta, BatchPlan | None]) -> tuple[RowsMeta, TrainBatch | None]:
        meta, plan = answer
        return meta, None if plan is None else assemble(plan, self._resolve)

    def _resolve(self, cells: Sequence[Cell]) -> Sequence[Column]:
        """Payloads from the object store, without a copy where they are on this machine."""
        timeout_s = self._answers.timeout_s
        try:
            return ray.get([cell.ref for cell in cells], timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            what = f"{len(cells)} payloads did not arrive within {timeout_s:g} s"
            hint = f"raise {self._answers.flag} if the network or a full object store's disk is only slow"
            raise DeadlineError(what, where=", ".join(sorted({cell.storage for cell in cells})), hint=hint) from error
        except ray.exceptions.ObjectLostError as error:
            lost = [cell.storage for cell in cells if cell.ref.hex() == error.object_ref_hex]
            raise PayloadLostError(
                f"a payload is lost: {type(error).__name__}",
                where=", ".join(lost or sorted({cell.storage for cell in cells})),
                expected="a storage process, and the node with the payload, that live as long as the rollout",
            ) from error
        except ray.exceptions.RayError as error:
            raise self._answers.named("take", error) from error
