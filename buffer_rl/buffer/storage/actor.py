"""A storage process: owner of payloads that others produced.

An object of Ray's store dies with the process that owns it, and the owner of a call's answer is the caller. So the
owner calls the producer for its payload: the producer writes it into the store of its own node, once, and it outlives
the producer. The owner then makes the call that the payload belongs to, and keeps nothing: a payload is freed when the
Buffer drops its reference. (What a producer is writing when its owner dies, Ray keeps until the run ends.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import ray

from buffer_rl.buffer.calling import Answers
from buffer_rl.buffer.cells import Cell
from buffer_rl.buffer.storage.offer import NumberedCall, Offered, StorageUnit
from buffer_rl.buffer.wire import Columns
from buffer_rl.errors import DeadlineError

MAX_REPORTS = 8
"""Reports that one owner works on at a time; others wait for it."""


@contextmanager
def payloads_taken(producer: Any, args: Sequence[Any], owner: str, timeout_s: float) -> Iterator[Sequence[Any]]:
    """``args`` with a cell, owned by this process, for each column that the actor ``producer`` offers in them.

    The cells leave ``args`` at the end of the block: a call that raised is in the traceback of its error, which may
    last for as long as the process does nothing else, and so would a payload that nobody has.

    Raises DeadlineError where the producer does not hand over what it offered within ``timeout_s``, WorkerDiedError
    where it died, WorkerError where it failed or the store is full."""
    offered = [
        (columns, name, column)
        for columns in args
        if isinstance(columns, Columns)
        for name, column in columns.items()
        if isinstance(column, Offered)
    ]
    assert offered, "a call without large columns goes to the Buffer itself"
    refs = _given(producer, [column.key for _, _, column in offered], owner, timeout_s)
    for columns, name, column in offered:
        columns[name] = Cell(num_rows=column.num_rows, ref=refs.pop(0), storage=owner)
    try:
        yield args
    finally:
        for columns, name, _ in offered:
            del columns[name]


def _given(producer: Any, keys: Sequence[int], owner: str, timeout_s: float) -> list[Any]:
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
        """The answer of the actor ``buffer`` to ``call``, whose offered columns are then in the store. Raises what
        ``payloads_taken`` does, with half of ``timeout_s``, and what ``Answers`` does, with all of it."""
        caller, sequence, open_from, method, offered = call
        with payloads_taken(producer, offered, self._name, timeout_s / 2) as args:
            answers = Answers(who="the Buffer", role="buffer", timeout_s=timeout_s, flag="--buffer-timeout-s")
            return answers.wait(method, partial(buffer.change.remote, caller, sequence, open_from, method, args))


def start_storage(num_units: int, buffer: Any) -> list[StorageUnit]:
    """Start ``--num-data-storage-units`` processes, spread over the nodes of the cluster, for the actor ``buffer``.

    One that dies is started again, if need be on another node. What it owned is lost: whoever reads it is told so
    (PayloadLostError), and the rollout is produced again."""
    remote = cast(Any, ray.remote)(
        num_cpus=0, max_restarts=-1, max_concurrency=MAX_REPORTS, scheduling_strategy="SPREAD"
    )
    names = [f"storage-{index}" for index in range(num_units)]
    return [StorageUnit(actor=remote(StorageActor).remote(name), name=name, buffer=buffer) for name in names]
