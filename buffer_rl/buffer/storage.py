"""Large payloads: in Ray's object store, owned by a process that outlives their producer.

An object of the store is lost with the process that put it there. So a producer sends its large columns as an argument
of its call; the receiver, the Buffer or a storage process, puts each into the store and makes the call with its
reference. It keeps nothing: a payload is freed when the Buffer drops the reference. Once the call is answered, nothing
depends on the producer. The price is one more copy within the node, or the transfer between nodes.

Blocking: the producer waits for the storage process, and this one for the Buffer, with a deadline that ends earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import ray

from buffer_rl.buffer.calls import NumberedCall
from buffer_rl.buffer.codec import Columns
from buffer_rl.buffer.columns import Cell, column_bytes
from buffer_rl.cluster.calling import Answers
from buffer_rl.records.groups import Column

MAX_REPORTS = 8
"""Reports that one owner works on at a time; others wait for it."""


def split_payloads(args: tuple[Any, ...], min_bytes: float) -> tuple[tuple[Any, ...], dict[str, Column]]:
    """The arguments of a call without the columns of at least ``min_bytes``, and these by name.

    They travel apart, since what the Buffer keeps of an argument keeps all of it in shared memory. They are not joined,
    which would copy them."""
    for index, columns in enumerate(args):
        if isinstance(columns, Columns):
            large = {name: column for name, column in columns.items() if column_bytes(column) >= min_bytes}
            small = Columns((name, column) for name, column in columns.items() if name not in large)
            return (*args[:index], small, *args[index + 1 :]), large
    return args, {}


@contextmanager
def owned_payloads(args: Sequence[Any], payloads: dict[str, Column], owner: str) -> Iterator[None]:
    """Inside the block, ``args`` have their ``payloads`` again: as cells, of objects that this process owns.

    Neither is in the arguments any longer afterwards: a call that raised is in the traceback of its error, which may
    last for as long as the process does nothing else, and would keep what was not stored alive."""
    columns, names = next(arg for arg in args if isinstance(arg, Columns)), list(payloads)
    try:
        for name in names:
            columns[name] = Cell(num_rows=len(payloads[name]), ref=ray.put(payloads.pop(name)), storage=owner)
        yield
    finally:
        payloads.clear()
        for name in names:
            columns.pop(name, None)


class StorageActor:
    """A process that owns payloads, and makes the calls that they belong to on the actor ``buffer``."""

    def __init__(self, name: str, buffer: Any, timeout_s: float) -> None:
        self._name = name
        self._buffer = buffer
        self._answers = Answers(who="the Buffer", role="buffer", timeout_s=timeout_s, flag="--buffer-timeout-s")

    def ready(self) -> None:
        """Answers once the process runs."""

    def execute_with_payloads(self, caller: str, call: NumberedCall, payloads: dict[str, Column]) -> Any:
        """``BufferActor.execute`` of one call, once this process owns the ``payloads``. Raises as ``Answers``."""
        with owned_payloads(call.args, payloads, self._name):
            return self._answers.wait(call.method, partial(self._buffer.execute.remote, caller, [call]))


def start_storage(num_units: int, buffer: Any, timeout_s: float) -> dict[str, Any]:
    """Start ``--num-data-storage-units`` processes, spread over the nodes of the cluster, for the actor ``buffer``,
    which answers them within ``timeout_s``. Returns them by their names in messages.

    One that dies is started again, if need be on another node. Its payloads are lost: reading one raises
    PayloadLostError, and the rollout is produced again."""
    remote = cast("Any", ray.remote)(
        num_cpus=0, max_restarts=-1, max_concurrency=MAX_REPORTS, scheduling_strategy="SPREAD"
    )
    names = [f"storage-{index}" for index in range(num_units)]
    return {name: remote(StorageActor).remote(name, buffer, timeout_s) for name in names}
