"""How a fake engine decodes: its slots, the clock that stands still in a pause, and which weights drew which tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class DecodeClock:
    """The time in which an engine decodes: it stands still while the engine is paused. Belongs to one event loop.

    now: seconds on a clock that never stands still.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._changed = asyncio.Event()

    @property
    def paused(self) -> bool:
        """Whether the engine is paused."""
        return self._paused_at is not None

    def time(self) -> float:
        """Seconds without those of pauses."""
        return (self._now() if self._paused_at is None else self._paused_at) - self._paused_s

    def pause(self) -> None:
        """Stand still; nothing in a pause."""
        if self._paused_at is None:
            self._paused_at = self._now()
            self._wake()

    def resume(self) -> None:
        """Run; nothing outside a pause."""
        if self._paused_at is not None:
            self._paused_s += self._now() - self._paused_at
            self._paused_at = None
            self._wake()

    async def runs(self, unless: asyncio.Event) -> bool:
        """Return True once the engine is not paused, or False if ``unless`` is set before."""
        while self.paused and not unless.is_set():
            await self._wait(None, unless)
        return not unless.is_set()

    async def reaches(self, due: float, unless: asyncio.Event) -> bool:
        """Return True once it is ``due``, or False if ``unless`` is set before."""
        while not unless.is_set():
            if (left := due - self.time()) <= 0:
                return True
            await self._wait(None if self.paused else left, unless)
        return False

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, timeout_s: float | None, unless: asyncio.Event) -> None:
        """Until ``unless``, or the beginning or end of a pause."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._changed, unless)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


@dataclass(slots=True, kw_only=True, eq=False)
class Decoding:
    """One row that an engine works on, or has worked on.

    begun: when its first token was drawn, on the engine's ``DecodeClock``; None while it waits for a slot. latency:
    seconds from then to its last token; they come evenly. marks: (version, share of the latency before it), in order.
    """

    begun: float | None = None
    latency: float = 0.0
    marks: list[tuple[int, float]] = field(default_factory=list)
    num_retractions: int = 0
    aborted: bool = False

    def begin(self, begun: float, latency: float, version: int) -> None:
        """The row has a slot, and its tokens come from the weights ``version``."""
        self.begun, self.latency = begun, latency
        self.marks.append((version, 0.0))

    def mark(self, version: int, now: float) -> None:
        """Tokens that are drawn after ``now`` come from the weights ``version``."""
        if self.begun is not None:
            share = (now - self.begun) / self.latency if self.latency else 1.0
            self.marks.append((version, min(max(share, 0.0), 1.0)))

    def spans(self, num_tokens: int, num_answered: int, version: int) -> list[dict[str, Any]]:
        """``[{"version", "start", "end"}]``, without empty spans, over the first ``num_answered`` of ``num_tokens``
        tokens. version: of a row without marks."""
        marks = self.marks or [(version, 0.0)]
        later = [min(1 + int(share * (num_tokens - 1)), num_answered) for _, share in marks[1:]]
        starts, ends = [0, *later], [*later, num_answered]
        spans: list[dict[str, Any]] = []
        for (number, _), start, end in zip(marks, starts, ends, strict=True):
            if spans and spans[-1]["version"] == str(number):
                spans[-1]["end"] = end
            elif end > start:
                spans.append({"version": str(number), "start": start, "end": end})
        return spans


class Slots:
    """``number`` slots, given out in the order in which they are asked for; unlimited where it is None.

    A slot remembers when it became free, so that the time that a queue takes does not grow with how late this process
    notices. Belongs to one event loop.
    """

    def __init__(self, number: int | None) -> None:
        self._free: asyncio.PriorityQueue[float] | None = None if number is None else asyncio.PriorityQueue()
        for _ in range(number or 0):
            self.release(0.0)

    async def acquire(self, unless: asyncio.Event) -> float | None:
        """A slot, as the time since which it is free; None if ``unless`` is set before there is one."""
        if self._free is None:
            return 0.0
        slot, never = asyncio.ensure_future(self._free.get()), asyncio.ensure_future(unless.wait())
        try:
            await asyncio.wait((slot, never), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if slot.done():
                self.release(slot.result())
            raise
        finally:
            never.cancel()
            if not slot.done():
                slot.cancel()
        return slot.result() if slot.done() else None

    def release(self, free_at: float) -> None:
        """The slot is free since ``free_at``, on the clock of the engine."""
        if self._free is not None:
            self._free.put_nowait(free_at)
