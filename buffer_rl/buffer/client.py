"""The Buffer as its callers see it: typed methods, deadlines, and a sequence number on every change."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import ray

from buffer_rl.buffer.calling import Answers, StartedCall
from buffer_rl.buffer.calls import OpenCalls
from buffer_rl.buffer.columns import BatchPlan, Cell, Columns, assemble
from buffer_rl.buffer.pool import ReadRequest, RowsMeta, Writer
from buffer_rl.buffer.readers import Splitting
from buffer_rl.buffer.storage import NumberedCall, Offer
from buffer_rl.errors import DeadlineError, PayloadLostError
from buffer_rl.types import Column, RolloutReport, RowId, Ticket, TrainBatch

T = TypeVar("T")

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

    def change(self, method: str, *args: Any, offer: Offer | None = None) -> Any:
        """Call a method that changes state, and wait for its answer. offer: of the large columns among ``args``, which
        go another way (see ``buffer_rl.buffer.storage``)."""
        with self._calls.numbered() as number:
            answers, ask = self._way((self._caller, *number, method, args), offer)
            return answers.wait(method, ask)

    async def achange(self, method: str, *args: Any, offer: Offer | None = None) -> Any:
        """``change`` for an event loop."""
        with self._calls.numbered() as number:
            answers, ask = self._way((self._caller, *number, method, args), offer)
            return await answers.until(method, ask)

    def _way(self, call: NumberedCall, offer: Offer | None) -> tuple[Answers, Callable[[], Any]]:
        if offer is None:
            return self._answers, partial(self.actor.change.remote, *call)
        return offer.answers, partial(offer.ask, call)

    def _start_change(self, method: str, *args: Any, understand: Callable[[Any], T]) -> StartedCall[T]:
        """``change`` without waiting. Calls are executed in the order in which they are made, but for those that a
        restart of the Buffer interrupts: they are made again when their answer is waited for."""
        sequence, open_from = self._calls.begin()
        ask = partial(self.actor.change.remote, self._caller, sequence, open_from, method, args)
        ended = partial(self._calls.end, sequence)
        return StartedCall(self._answers, method, ask, understand=understand, ended=ended)

    def read(self, method: str, *args: Any) -> Any:
        """Call a method whose repeat changes nothing, and wait for its answer."""
        return self._answers.wait(method, partial(self.actor.read.remote, method, args))

    async def aread(self, method: str, *args: Any) -> Any:
        """``read`` for an event loop."""
        return await self._answers.until(method, partial(self.actor.read.remote, method, args))

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

    def get_totals(self, rollout_id: int) -> tuple[int, int]:
        """Samples and unmasked response tokens that the step trains on, over all ranks."""
        return self.read("get_totals", rollout_id)  # type: ignore[no-any-return]

    def put_fields(
        self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column], writer: Writer | None = None
    ) -> None:
        """Add derived fields to rows of a task; see ``DataPool.put_fields``."""
        self.start_put_fields(task, row_ids, columns, writer).result()

    def start_put_fields(
        self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column], writer: Writer | None = None
    ) -> StartedCall[None]:
        """``put_fields`` without waiting."""
        args = (task, list(row_ids), Columns(columns), writer)
        return self._start_change("put_fields", *args, understand=lambda _: None)

    def get_meta(self, task: str, request: ReadRequest, timeout_s: float) -> RowsMeta:
        """Rows for a reading task as soon as there are any, or the end (see ``DataPool.get_meta``).

        Raises DeadlineError, naming the task and the fields, where nothing comes within ``timeout_s``."""
        return self._once_ready(task, request, timeout_s, lambda: (self.change("get_meta", task, request), None))[0]

    def take(
        self, task: str, request: ReadRequest, timeout_s: float, fields: Sequence[str] | None = None
    ) -> tuple[RowsMeta, TrainBatch | None]:
        """``get_meta``, and ``get_fields`` of these rows, in one call; None at the end."""
        ask = partial(self.change, "take", task, request, None if fields is None else list(fields))
        return self._taken(self._once_ready(task, request, timeout_s, ask))

    def start_take(
        self, task: str, request: ReadRequest, fields: Sequence[str] | None = None
    ) -> StartedCall[tuple[RowsMeta, TrainBatch | None]]:
        """``take`` without waiting for the answer, nor for rows: what is not ready is not handed out."""
        names = None if fields is None else list(fields)
        return self._start_change("take", task, request, names, understand=self._taken)

    def _taken(self, answer: tuple[RowsMeta, BatchPlan | None]) -> tuple[RowsMeta, TrainBatch | None]:
        meta, plan = answer
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
