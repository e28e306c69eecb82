"""Large payloads: in the object store, written once by their producer and owned by a storage process.

An object of Ray's store dies with the process that owns it, and the owner of a call's answer is the caller. So the
owner calls the producer for its payload: the producer writes it into the store of its own node, once, and it outlives
the producer. The owner then makes the call that the payload belongs to, and keeps nothing: a payload is freed when the
Buffer drops its reference. (What a producer is writing when its owner dies, Ray keeps until the run ends.)

Blocking: the producer waits for the owner. The owner waits for the producer's ``give_payloads`` and then for the
Buffer, with deadlines that end earlier; so that method must be answered while the producer waits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import ray

from buffer_rl.buffer.calling import Answers
from buffer_rl.buffer.columns import Cell, Columns, column_bytes
from buffer_rl.errors import DeadlineError
from buffer_rl.types import Column

NumberedCall = tuple[str, int, int, str, tuple[Any, ...]]
"""A call that changes the Buffer: the arguments of ``BufferActor.change``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPlaceholder:
    """Stands for a large column in the arguments of a call; its producer keeps the column under ``key``."""

    key: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUnit:
    """A process that owns payloads, and its name in messages. buffer: the actor to which it forwards calls; None where
    it is the Buffer itself."""

    actor: Any
    name: str
    buffer: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadTransfer:
    """Moves a call's large columns from the producer to their owner, and forwards the call to the Buffer.

    producer: the actor, a ``PayloadProducer``. unit: the owner. timeout_s: for the Buffer's answer; half of it for the
    columns.
    """

    producer: Any
    unit: StorageUnit
    timeout_s: float

    def submit(self, call: NumberedCall) -> Any:
        """Make the call; returns the reference to its answer."""
        forward_to = () if self.unit.buffer is None else (self.unit.buffer,)
        return self.unit.actor.change_with_payloads.remote(self.producer, self.timeout_s, call, *forward_to)

    @property
    def answers(self) -> Answers:
        """Waits for the answer of the owner: longer than it waits, so that it can say for whom."""
        who = "the Buffer" if self.unit.buffer is None else self.unit.name
        return Answers(who=who, role=self.unit.name, timeout_s=2 * self.timeout_s, flag="--buffer-timeout-s")


MAX_REPORTS = 8
"""Reports that one owner works on at a time; others wait for it."""


@contextmanager
def fetched_payloads(producer: Any, args: Sequence[Any], owner: str, timeout_s: float) -> Iterator[Sequence[Any]]:
    """``args`` with a cell, owned by this process, in place of each placeholder of the actor ``producer``.

    The cells leave ``args`` at the end of the block: a call that raised is in the traceback of its error, which may
    last for as long as the process does nothing else, and would keep the unused payload alive.

    Raises DeadlineError where the producer does not send the payloads within ``timeout_s``, WorkerDiedError where it
    died, WorkerError where it failed or the store is full."""
    placeholders = [
        (columns, name, column)
        for columns in args
        if isinstance(columns, Columns)
        for name, column in columns.items()
        if isinstance(column, ColumnPlaceholder)
    ]
    assert placeholders, "a call without large columns goes to the Buffer itself"
    refs = _fetch(producer, [column.key for _, _, column in placeholders], owner, timeout_s)
    for columns, name, column in placeholders:
        columns[name] = Cell(num_rows=column.num_rows, ref=refs.pop(0), storage=owner)
    try:
        yield args
    finally:
        for columns, name, _ in placeholders:
            del columns[name]


def _fetch(producer: Any, keys: Sequence[int], owner: str, timeout_s: float) -> list[Any]:
    # What the producer returns last is small, and is read: the reference to an answer that failed looks like any other.
    refs: list[Any]
    *refs, done = producer.give_payloads.options(num_returns=len(keys) + 1).remote(keys)
    try:
        ray.get(done, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineError(
            f"a producer did not hand over {len(keys)} payloads within {timeout_s:g} s",
            where=owner,
            hint="does user code keep the event loop of a rollout worker busy?",
        ) from error
    except ray.exceptions.RayError as error:
        producers = Answers(who="a producer of payloads", role=owner, timeout_s=timeout_s, flag="--buffer-timeout-s")
        raise producers.named("give_payloads", error) from error
    return refs


class StorageActor:
    """A process that owns payloads. The Buffer's process answers ``change_with_payloads`` too."""

    def __init__(self, name: str) -> None:
        self._name = name

    def ready(self) -> None:
        """Answers once the process runs."""

    def change_with_payloads(self, producer: Any, timeout_s: float, call: NumberedCall, buffer: Any) -> Any:
        """The answer of the actor ``buffer`` to ``call``, whose large columns are then in the store. Raises what
        ``fetched_payloads`` does, with half of ``timeout_s``, and what ``Answers`` does, with all of it."""
        caller, sequence, open_from, method, sent = call
        with fetched_payloads(producer, sent, self._name, timeout_s / 2) as args:
            answers = Answers(who="the Buffer", role="buffer", timeout_s=timeout_s, flag="--buffer-timeout-s")
            return answers.wait(method, partial(buffer.change.remote, caller, sequence, open_from, method, args))


def start_storage(num_units: int, buffer: Any) -> list[StorageUnit]:
    """Start ``--num-data-storage-units`` processes, spread over the nodes of the cluster, for the actor ``buffer``.

    One that dies is started again, if need be on another node. Its payloads are lost: reading one raises
    PayloadLostError, and the rollout is produced again."""
    remote = cast(Any, ray.remote)(
        num_cpus=0, max_restarts=-1, max_concurrency=MAX_REPORTS, scheduling_strategy="SPREAD"
    )
    names = [f"storage-{index}" for index in range(num_units)]
    return [StorageUnit(actor=remote(StorageActor).remote(name), name=name, buffer=buffer) for name in names]


class PayloadProducer:
    """Mixin of async actors that store payloads: answers the owner's calls. outgoing: the large columns of calls under
    way, by key."""

    outgoing: dict[int, Column]

    async def give_payloads(self, keys: Sequence[int]) -> tuple[Any, ...]:
        """The columns of ``keys``, each an object of the store, and True behind them."""
        return *(self.outgoing[key] for key in keys), True


class StorageClient:
    """Sends the large columns of one producer, which must be a ``PayloadProducer`` with these ``outgoing`` columns.

    units: storage processes, taken in turn. min_bytes: smaller columns stay inside the call that reports them.
    Make it in the producer's process.
    """

    def __init__(
        self, units: Sequence[StorageUnit], outgoing: dict[int, Column], *, timeout_s: float, min_bytes: int
    ) -> None:
        self._me = cast(Any, ray).get_runtime_context().current_actor
        self._units = itertools.cycle(units)
        self._outgoing = outgoing
        self._timeout_s = timeout_s
        self._min_bytes = min_bytes
        self._keys = itertools.count()

    @contextmanager
    def transfer(
        self, columns: Mapping[str, Column], *, blocking: bool
    ) -> Iterator[tuple[Columns, PayloadTransfer | None]]:
        """The columns to send in a call that is made and answered inside the block, and the transfer of the large ones
        for ``BufferClient.through``; None where all of them are small.

        blocking: whether the thread waits for the answer. The event loop's thread could not answer the owner
        meanwhile: the columns stay as they are."""
        large = [name for name, column in columns.items() if column_bytes(column) >= self._min_bytes]
        if not large or (blocking and _on_event_loop()):
            yield Columns(columns), None
            return
        sent = Columns(columns)
        keys = {name: next(self._keys) for name in large}
        for name, key in keys.items():
            self._outgoing[key] = columns[name]
            sent[name] = ColumnPlaceholder(key=key, num_rows=len(columns[name]))
        try:
            yield sent, PayloadTransfer(producer=self._me, unit=next(self._units), timeout_s=self._timeout_s)
        finally:
            for key in keys.values():
                self._outgoing.pop(key, None)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
