"""Places in which a fake engine works on requests."""

from __future__ import annotations

import asyncio


class Slots:
    """``number`` slots, given out in the order in which they are asked for; unlimited where it is None.

    A slot remembers when it became free, so that the time that a queue takes does not grow with how late this process
    notices. Belongs to one event loop.
    """

    def __init__(self, number: int | None) -> None:
        self._free: asyncio.PriorityQueue[float] | None = None if number is None else asyncio.PriorityQueue()
        for _ in range(number or 0):
            self.give_back(0.0)

    async def take(self, unless: asyncio.Event) -> float | None:
        """A slot, as the time since which it is free; None if ``unless`` is set before there is one."""
        if self._free is None:
            return 0.0
        slot, never = asyncio.ensure_future(self._free.get()), asyncio.ensure_future(unless.wait())
        try:
            await asyncio.wait((slot, never), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if slot.done():
                self.give_back(slot.result())
            raise
        finally:
            never.cancel()
            if not slot.done():
                slot.cancel()
        return slot.result() if slot.done() else None

    def give_back(self, free_at: float) -> None:
        """The slot is free since ``free_at``, on the clock of the event loop."""
        if self._free is not None:
            self._free.put_nowait(free_at)
