"""Whether it is the engines that fail or one group's prompt: they are asked for a prompt that they answered before."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from buffer_rl.errors import BufferRLError
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.types import RowId, SampleGroup, Ticket

if TYPE_CHECKING:
    from buffer_rl.engine.client import EngineClient

DEADLINE_S = 30.0
"""More than the client's own retries take. Engines that are busy for longer say nothing."""


class Canary:
    """Belongs to one rollout. stop: set when the rollout needs no answers any more."""

    def __init__(self, context: RolloutContext, ticket: Ticket, stop: asyncio.Event) -> None:
        self.engine = context.engine
        self._ticket = ticket
        self._stop = stop
        self._row: RowId | None = None
        self._prompt: list[int] = []

    def remember(self, group: SampleGroup) -> None:
        """A group that was generated: its prompt is the one to ask for. Passed over where it is not plain numbers,
        which nobody checked of a group that is dropped."""
        tokens, length = group[0].tokens, group[0].response_length
        if isinstance(tokens, list) and isinstance(length, int) and 0 <= length < len(tokens):
            prompt = tokens[: len(tokens) - length]
            if all(isinstance(token, int) for token in prompt):
                self._row, self._prompt = group[0].row_id, prompt

    async def is_answered(self) -> bool:
        """Whether the engines answer now; False, too, where no prompt is known, or they need too long."""
        if self.engine is None or self._row is None:
            return False
        ask = asyncio.create_task(self._ask(self.engine, self._row))
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait({ask, stop}, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            return ask in done and ask.result()
        finally:
            for task in (ask, stop):
                task.cancel()
            await asyncio.gather(ask, stop, return_exceptions=True)

    async def _ask(self, engine: EngineClient, row: RowId) -> bool:
        """One token, under a request id that was never used."""
        rid = f"{self._ticket.task}:{row}:canary:{uuid.uuid4().hex}"
        params = {"temperature": 0.0, "max_new_tokens": 1, "sampling_seed": 0}
        try:
            await engine.agenerate(rid, self._prompt, params)
        except BufferRLError:
            return False
        return True
