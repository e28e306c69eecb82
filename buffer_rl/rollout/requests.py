"""The requests of one rollout that an engine works on, their numbers, and the stop of those that are not needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from buffer_rl.errors import EngineError
from buffer_rl.types import RowId, Sample

if TYPE_CHECKING:
    from buffer_rl.engine.answer import GenerateResult
    from buffer_rl.engine.client import EngineClient

REPEAT_S = 0.5
"""A request may reach its engine after the abort did, so the abort is repeated until every answer is here."""
GRACE_S = 30.0
"""An answer to an abort comes at once; a generate function of the user's may take longer to see it. Then it is
cancelled."""


class RequestNumbers:
    """Numbers the responses that are asked for during one attempt at a group, for their seeds and request ids.

    Each row counts from 0, in the order of the calls. A response that goes on, such as with its next turn, keeps its
    number: it asks from a later position.
    """

    def __init__(self) -> None:
        self._next: Counter[RowId] = Counter()
        # By identity, with the sample itself, so that no other one can have its identity; and where it asked from.
        self._last: dict[int, tuple[Sample, RowId, int, int]] = {}

    def number(self, sample: Sample) -> int:
        """The number of the response that ``sample`` asks for now."""
        row_id, position = sample.row_id, sample.response_length
        _, last_row_id, last_position, number = self._last.get(id(sample), (None, None, 0, 0))
        if row_id != last_row_id or position <= last_position:
            number = self._next[row_id]
            self._next[row_id] += 1
        self._last[id(sample)] = (sample, row_id, position, number)
        return number


class Requests:
    """Belongs to one rollout and one event loop. ``stopped``: nothing is to be generated any more."""

    grace_s = GRACE_S

    def __init__(self) -> None:
        self.stopped = False
        self._running: set[str] = set()

    async def ask(
        self, engine: EngineClient, rid: str, input_ids: Sequence[int], sampling_params: dict[str, Any]
    ) -> GenerateResult:
        """The engine's answer; ``stop`` may end it early, with finish reason ``abort``."""
        self._running.add(rid)
        try:
            return await engine.agenerate(rid, input_ids, sampling_params)
        finally:
            self._running.discard(rid)

    async def stop(self, engine: EngineClient | None, tasks: Callable[[], Sequence[asyncio.Task[Any]]]) -> None:
        """Abort exactly these requests, and wait until ``tasks()``, those that still generate, are none.

        What is left after ``grace_s`` is cancelled, and awaited too. An engine that cannot be reached has nothing to
        abort.
        """
        self.stopped = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                while pending := tasks():
                    if self._running and engine is not None:
                        with contextlib.suppress(EngineError):
                            await engine.abort(sorted(self._running))
                    await asyncio.wait(pending, timeout=REPEAT_S)
        late = tasks()
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
