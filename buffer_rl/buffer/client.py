"""The Buffer as its callers see it: typed methods, deadlines, and a sequence number on every change.

``BufferClient`` serves the driver and the trainer ranks; ``RolloutClient`` is the ``buffer`` that a rollout
function receives.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ray

from buffer_rl.errors import BufferRLError, DeadlineError, WorkerError
from buffer_rl.types import Column, GroupUid, QueueHeader, RolloutReport, RowId, SampleGroup, Ticket, TrainBatch


class BufferClient:
    """Calls one Buffer actor. Safe to use from several threads; each process makes its own.

    Raises DeadlineError where the Buffer does not answer within ``timeout_s``, and whatever error of
    ``buffer_rl.errors`` the Buffer raised.
    """

    def __init__(self, actor: Any, *, timeout_s: float, caller: str = "") -> None:
        self.actor = actor
        self.timeout_s = timeout_s
        self._caller = f"{caller or 'client'}-{uuid.uuid4().hex}"
        self._sequence = itertools.count()

    def change(self, method: str, *args: Any) -> Any:
        """Call a method that changes state, and wait for its answer."""
        return self._wait(method, self.actor.change.remote(self._caller, next(self._sequence), method, *args))

    async def achange(self, method: str, *args: Any) -> Any:
        """``change`` for an event loop."""
        return await self._await(method, self.actor.change.remote(self._caller, next(self._sequence), method, *args))

    def read(self, method: str, *args: Any) -> Any:
        """Call a method whose repeat changes nothing, and wait for its answer."""
        return self._wait(method, self.actor.read.remote(method, *args))

    async def aread(self, method: str, *args: Any) -> Any:
        """``read`` for an event loop."""
        return await self._await(method, self.actor.read.remote(method, *args))

    # -- the driver's and the trainer's methods ------------------------------------------------------

    def generate(self, rollout_id: int, evaluation: bool = False) -> Ticket:
        """Open a rollout; see ``BufferState.generate``."""
        return self.change("generate", rollout_id, evaluation)  # type: ignore[no-any-return]

    def close_rollout(self, ticket: Ticket) -> RolloutReport:
        """Select the step's groups; see ``BufferState.close_rollout``."""
        return self.change("close_rollout", ticket)  # type: ignore[no-any-return]

    def adopt(self, ticket: Ticket, row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> None:
        """Take groups over that were finished elsewhere; see ``BufferState.adopt``."""
        self.change("adopt", ticket, list(row_ids), dict(columns))

    def get_data(
        self, rollout_id: int, dp_rank: int = 0, dp_size: int = 1, num_steps: int = 1, step: int = 0
    ) -> TrainBatch:
        """One rank's share of mini-batch ``step`` of ``num_steps``; see ``DataPool.share``."""
        return self.read("get_data", rollout_id, dp_rank, dp_size, num_steps, step)  # type: ignore[no-any-return]

    def get_eval_data(self, rollout_id: int) -> TrainBatch:
        """All rows of an evaluation."""
        return self.read("get_eval_data", rollout_id)  # type: ignore[no-any-return]

    def put_fields(self, task: str, row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> None:
        """Add derived fields to rows of a task."""
        self.change("put_fields", task, list(row_ids), dict(columns))

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

    def get_progress(self) -> dict[str, Any]:
        """Counts for a display."""
        return self._wait("get_progress", self.actor.get_progress.remote())  # type: ignore[no-any-return]

    def _wait(self, method: str, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=self.timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise self._late(method) from error
        except ray.exceptions.RayError as error:
            raise _named(method, error) from error

    async def _await(self, method: str, ref: Any) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), self.timeout_s)
        except TimeoutError as error:
            raise self._late(method) from error
        except ray.exceptions.RayError as error:
            raise _named(method, error) from error

    def _late(self, method: str) -> DeadlineError:
        return DeadlineError(
            f"the Buffer did not answer {method} within {self.timeout_s:g} s",
            where="buffer",
            hint="raise --buffer-timeout-s if the machine is only slow",
        )


def _named(method: str, error: Any) -> BufferRLError:
    """The Buffer's own error where it raised one; otherwise one that says that the Buffer failed."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BufferRLError):
        return cause
    if isinstance(error, ray.exceptions.RayActorError):
        return WorkerError(f"the Buffer's process died: {error}", where=f"buffer.{method}")
    return WorkerError(f"{type(cause or error).__name__}: {cause or error}", where=f"buffer.{method}")


class GroupEncoder(Protocol):
    """Turns a group that user code filled into rows and columns."""

    def encode(self, group: SampleGroup, evaluation: bool) -> tuple[list[RowId], dict[str, Column]]: ...


ChooseQueued = Callable[[list[QueueHeader], int], list[GroupUid]]
"""A buffer filter: of the queue's headers, which groups to lease next, in order."""


class RolloutClient:
    """The ``buffer`` of one rollout (see ``buffer_rl.contracts.RolloutBuffer``)."""

    def __init__(
        self, client: BufferClient, ticket: Ticket, encoder: GroupEncoder, choose: ChooseQueued | None = None
    ) -> None:
        self._client = client
        self._ticket = ticket
        self._encoder = encoder
        self._choose = None if ticket.evaluation else choose
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
        return self._client.change("get_samples", self._ticket, num_samples, chosen)  # type: ignore[no-any-return]

    async def aget_samples(self, num_samples: int) -> list[SampleGroup]:
        """Lease groups; the queued ones that the buffer filter chooses come first."""
        chosen = None
        if self._choose is not None and (headers := await self._client.aread("get_headers")):
            chosen = await asyncio.to_thread(self._choose, headers, num_samples)
        return await self._client.achange(  # type: ignore[no-any-return]
            "get_samples", self._ticket, num_samples, chosen
        )

    def add_samples(self, groups: Sequence[SampleGroup]) -> None:
        """Give leased groups back."""
        self._client.change("add_samples", self._ticket, [(group.uid, group.attempt) for group in groups])

    async def aadd_samples(self, groups: Sequence[SampleGroup]) -> None:
        """Give leased groups back."""
        await self._client.achange("add_samples", self._ticket, [(group.uid, group.attempt) for group in groups])

    def finish(self, group: SampleGroup) -> None:
        """Report a finished group."""
        self._client.change("finish", *self._finish_args(group))
        self.finished[group.uid] = group

    async def afinish(self, group: SampleGroup) -> None:
        """Report a finished group."""
        await self._client.achange("finish", *self._finish_args(group))
        self.finished[group.uid] = group

    def reject(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group."""
        self._client.change("reject", self._ticket, group.uid, group.attempt, reason)

    async def areject(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group."""
        await self._client.achange("reject", self._ticket, group.uid, group.attempt, reason)

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

    def _finish_args(self, group: SampleGroup) -> tuple[Any, ...]:
        row_ids, columns = self._encoder.encode(group, self._ticket.evaluation)
        return self._ticket, group.uid, group.attempt, row_ids, columns
