"""A producer's side of the storage: offer large columns, get cells that refer to them.

Who waits for whom: the producer waits for a storage process (with a deadline), which waits for the producer's
``give_payload`` (with half of it); so that method must be answered while the producer waits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import ray

from buffer_rl.buffer.calling import Answers
from buffer_rl.buffer.cells import Cell, column_bytes
from buffer_rl.types import Column


class PayloadProducer:
    """Mixin of async actors that store payloads: answers the storage's calls. ``offers`` are the columns by key."""

    offers: dict[int, Column]

    async def give_payload(self, key: int) -> Column:
        """The column offered under ``key``."""
        return self.offers[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUnit:
    """A process that owns payloads (see ``pull_payloads``), and its name in messages."""

    actor: Any
    name: str


class StorageClient:
    """Stores the large columns of one producer, which must be a ``PayloadProducer`` and hold ``offers``.

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

    async def astore(self, columns: Mapping[str, Column]) -> dict[str, Column | Cell]:
        """``columns`` with the large ones in the store; small ones as they are.

        Raises DeadlineError or WorkerError, naming the storage, if it does not take them."""
        offer = self._offer(columns)
        if not offer:
            return dict(columns)
        unit = next(self._units)
        try:
            refs = await self._answers(unit).until("pull", partial(self._pull, unit, offer))
        finally:
            self._withdraw(offer)
        return _with_cells(columns, offer, refs, unit)

    def store(self, columns: Mapping[str, Column]) -> dict[str, Column | Cell]:
        """``astore`` for a thread. In the thread of the event loop, which could not answer meanwhile, the columns stay
        as they are."""
        if _on_event_loop() or not (offer := self._offer(columns)):
            return dict(columns)
        unit = next(self._units)
        try:
            refs = self._answers(unit).wait("pull", partial(self._pull, unit, offer))
        finally:
            self._withdraw(offer)
        return _with_cells(columns, offer, refs, unit)

    def _offer(self, columns: Mapping[str, Column]) -> dict[str, int]:
        """The keys under which the large columns are offered, by name."""
        offer = {name: next(self._keys) for name, column in columns.items() if column_bytes(column) >= self._min_bytes}
        self._offers.update((key, columns[name]) for name, key in offer.items())
        return offer

    def _withdraw(self, offer: Mapping[str, int]) -> None:
        for key in offer.values():
            self._offers.pop(key, None)

    def _pull(self, unit: StorageUnit, offer: Mapping[str, int]) -> Any:
        return unit.actor.pull.remote(self._me, list(offer.values()), self._timeout_s / 2)

    def _answers(self, unit: StorageUnit) -> Answers:
        return Answers(who=unit.name, role=unit.name, timeout_s=self._timeout_s, flag="--buffer-timeout-s")


def _with_cells(
    columns: Mapping[str, Column], offer: Mapping[str, int], refs: Sequence[Any], unit: StorageUnit
) -> dict[str, Column | Cell]:
    stored: dict[str, Column | Cell] = dict(columns)
    for name, ref in zip(offer, refs, strict=True):
        column = columns[name]
        stored[name] = Cell(num_rows=len(column), ref=ref, storage=unit.name)
    return stored


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
