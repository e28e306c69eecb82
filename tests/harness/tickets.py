"""What tests of the Buffer do with tickets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.state import BufferState
from buffer_rl.plan.schedule import Mode, Schedule
from buffer_rl.records.groups import RolloutReport, Ticket


def close_rollout(buffer: Any, ticket: Ticket) -> RolloutReport:
    """End a ticket and close the selection of its number. The report is of both."""
    call = buffer.call if isinstance(buffer, BufferClient) else lambda method, *args: method(buffer, *args)
    ended: RolloutReport = call(BufferState.end_ticket, ticket)
    if ticket.evaluation:
        return ended
    closed: RolloutReport | None
    closed, _ = call(BufferState.close_selection, ticket.rollout_id)
    assert closed is not None
    return replace(closed, drops=dict(sorted({**ended.drops, **closed.drops}.items())))


def schedule_of(staleness: int | None) -> Schedule | None:
    """The schedule of tests with this staleness, whose steps take the groups of their own tickets."""
    if staleness is None:
        return None
    return Schedule(mode=Mode.ONE_STEP_OFF if staleness else Mode.LOCKSTEP, target=staleness, max_staleness=staleness)
