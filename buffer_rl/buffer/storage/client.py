"""A producer's side of the storage: offer large columns to the process that is to own them, in a call on the Buffer.

Who waits for whom: the producer waits for the owner, which waits for the producer's ``give_payloads`` and then for the
Buffer, with deadlines that end earlier; so that method must be answered while the producer waits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import ray

from buffer_rl.buffer.cells import column_bytes
from buffer_rl.buffer.storage.offer import Offer, Offered, StorageUnit
from buffer_rl.buffer.wire import Columns
from buffer_rl.types import Column


class PayloadProducer:
    """Mixin of async actors that store payloads: answers the owner's calls. ``offers`` are the columns by key."""

    offers: dict[int, Column]

    async def give_payloads(self, keys: Sequence[int]) -> tuple[Any, ...]:
        """The columns offered under ``keys``, each an object of the store, and that this is all of them."""
        return *(self.offers[key] for key in keys), True


class StorageClient:
    """Offers the large columns of one producer, which must be a ``PayloadProducer`` and hold ``offers``.

    units: storage processes, taken in turn. min_bytes: smaller columns stay inside the call that reports them.
    Make it in the producer's process.
    """

    def __init__(
        self, units: Sequence[StorageUnit], offers: dict[int, Column], *, timeout_s: float, min_bytes: int
    ) -> None:
        self._me = cast(Any, ray).get_runtime_context().current_actor
        self._units = itertools.cycle(units)
        self._offers = offers
        self._timeout_s = timeout_s
        self._min_bytes = min_bytes
        self._keys = itertools.count()

    @contextmanager
    def offered(self, columns: Mapping[str, Column], *, blocking: bool) -> Iterator[tuple[Columns, Offer | None]]:
        """What a call, made and answered inside the block, sends for ``columns``, and the ``offer`` for
        ``BufferClient.change``; None where all of them are small.

        blocking: whether the thread waits for the answer. The event loop's thread could then not hand anything over:
        the columns stay as they are."""
        large = [name for name, column in columns.items() if column_bytes(column) >= self._min_bytes]
        if not large or (blocking and _on_event_loop()):
            yield Columns(columns), None
            return
        sent = Columns(columns)
        keys = {name: next(self._keys) for name in large}
        for name, key in keys.items():
            self._offers[key] = columns[name]
            sent[name] = Offered(key=key, num_rows=len(columns[name]))
        try:
            yield sent, Offer(producer=self._me, unit=next(self._units), timeout_s=self._timeout_s)
        finally:
            for key in keys.values():
                self._offers.pop(key, None)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
