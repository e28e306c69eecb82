"""How a fake engine decodes: its slots, the clock that stands still in a pause, which weights drew which tokens, and
what a SGLang 0.5.23 server does with requests, as it was measured.

Not here: weight updates, which the fake engine takes from disk alone.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
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


@dataclass(kw_only=True, eq=False)
class SglangRules:
    """The rules of one fake engine, and which ids of requests (rid) it has. Belongs to the engine's event loop.

    * A token id outside ``[0, vocab_size)`` or an empty prompt kills the server. vocab_size: with the padding of the
      embedding.
    * A rid is refused with HTTP 400 while the request that has it lives: ``abort_s`` seconds after the answer to its
      abort, ``disconnect_s`` after its connection was lost.
    * A request that arrives in a pause runs after it; until then no abort ends it, and it keeps its rid.
    * ``/ready`` is 503 in a pause.
    * ``sampling_seed`` changes nothing, unless the server runs with deterministic inference; the rows of a request then
      have the one seed.
    """

    vocab_size: int = 2**31
    abort_s: float = 0.03
    disconnect_s: float = 1.0
    deterministic: bool = False

    def __post_init__(self) -> None:
        self._draws = itertools.count(1)
        self._free_at: dict[str, float] = {}  # on the clock of the event loop; infinity for a request that lives on
        self._queued: set[str] = set()  # since the pause
        self._resumed = asyncio.Event()
        self._resumed.set()

    @property
    def paused(self) -> bool:
        """Whether the engine is paused."""
        return not self._resumed.is_set()

    def pause(self) -> None:
        """What arrives from now on waits."""
        self._resumed.clear()

    def resume(self) -> None:
        """What waited runs, but for the requests whose clients went away: these end."""
        lost = {rid for rid in self._queued if self._free_at.get(rid) != math.inf}
        self._free_at.update(dict.fromkeys(lost, _now() + self.abort_s))
        self._queued.clear()
        self._resumed.set()

    def is_deadly(self, prompt: Sequence[int]) -> bool:
        """Whether the server dies of ``prompt``."""
        return not prompt or min(prompt) < 0 or max(prompt) >= self.vocab_size

    def has(self, rid: str) -> bool:
        """Whether a request has ``rid``, so that it is refused to others."""
        return rid in self._queued or self._free_at.get(rid, 0.0) > _now()

    def hold(self, rids: Sequence[str]) -> None:
        """A request has ``rids`` from now on."""
        self._free_at.update(dict.fromkeys(rids, math.inf))
        if self.paused:
            self._queued.update(rids)

    def release(self, rids: Sequence[str], *, lost: bool) -> None:
        """The request is answered, or its connection ``lost``: then it lives on for a while."""
        self._free_at.update(dict.fromkeys(rids, _now() + self.disconnect_s if lost else 0.0))

    async def admitted(self) -> None:
        """Return when the engine is not paused."""
        await self._resumed.wait()

    def abort(self, prefix: str) -> None:
        """End the requests without a client whose rid begins with ``prefix``."""
        for rid, free_at in self._free_at.items():
            if rid.startswith(prefix) and free_at != math.inf:
                self._free_at[rid] = min(free_at, _now() + self.abort_s)

    def seed(self, params: dict[str, Any]) -> int:
        """What decides the tokens of a row: its request's seed, or chance, here a number that does not come again."""
        if self.deterministic:
            return int(params.get("sampling_seed", 0))
        return next(self._draws)

    def forget(self) -> None:
        """Another server has taken the place of this one."""
        self._free_at.clear()
        self._queued.clear()
        self._resumed.set()


def refusal(rids: Sequence[str]) -> dict[str, Any]:
    """The body of HTTP 400 for ids that are taken."""
    return {"error": {"message": f"Duplicate request ID detected: {', '.join(rids)}"}}


def _now() -> float:
    return asyncio.get_running_loop().time()
