"""The deadline of a ticket's work in a rollout worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from buffer_rl.args import Args
from buffer_rl.kinds.rollout import RolloutBuffer
from buffer_rl.plan.schedule import Schedule

EARLY_S = 0.001
"""A timer may fire so much early."""


def ticket_limit_s(args: Args) -> float:
    """Seconds that ``ticket_deadline`` allows."""
    return Schedule.of(args).ticket_limit_s(args.rollout_timeout_s)


def overdue(args: Args) -> str:
    """What a ticket did that is past its deadline."""
    staleness, limit = Schedule.of(args).target, ticket_limit_s(args)
    if not staleness:
        return f"took longer than {limit:g} s"
    return f"leased, finished or dropped no group for {limit:g} s, which is {staleness + 1} times --rollout-timeout-s"


@asynccontextmanager
async def ticket_deadline(args: Args, buffer: RolloutBuffer, grace_s: float = 0.0) -> AsyncIterator[asyncio.Timeout]:
    """A timeout for the work on ``buffer.ticket``, with ``grace_s`` added.

    At a staleness of 0, ``--rollout-timeout-s`` is for the rollout as a whole. Else its requests queue behind those of
    S other tickets, and what it drops it replaces: (S + 1) times as long may pass after the last group that it leased,
    finished or dropped."""
    limit = ticket_limit_s(args) + grace_s
    if not Schedule.of(args).target:
        async with asyncio.timeout(limit) as deadline:
            yield deadline
        return
    loop = asyncio.get_running_loop()
    opened = loop.time()
    async with asyncio.timeout(None) as deadline:
        timers: list[asyncio.TimerHandle] = []

        def look() -> None:
            """End the work if it is overdue, else look again when it may be."""
            due = max(opened, buffer.progressed_at) + limit
            if loop.time() >= due - EARLY_S:
                deadline.reschedule(loop.time())
            else:
                timers[:] = [loop.call_at(due, look)]

        look()
        try:
            yield deadline
        finally:
            for timer in timers:
                timer.cancel()
