"""Generates and scores one group: the path that training and evaluation share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from buffer_rl.errors import BufferRLError, DeadlineError, RolloutError
from buffer_rl.rollout.calling import call_user
from buffer_rl.rollout.context import LeaseScope, RolloutContext, lease_scope
from buffer_rl.rollout.failures import RewardFailure, traceback_tail
from buffer_rl.rollout.generate import generate
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.types import Sample, SampleGroup, Status, Ticket

T = TypeVar("T")


async def produce(
    context: RolloutContext, ticket: Ticket, group: SampleGroup, params: dict[str, Any], stats: RolloutStats
) -> list[RewardFailure]:
    """Generate every sample of ``group`` in place, then score those that were not aborted.

    Returns the failures of rewards. Raises what the generate function raised, as RolloutError unless it is
    one of ``buffer_rl.errors`` already; the group's other requests are cancelled and awaited first.
    """
    scope = LeaseScope(task=ticket.task, incarnation=group.incarnation or ticket.incarnation, attempt=group.attempt)
    with lease_scope(scope), stats.generating.running():
        tasks = await run_all(_generate_one(context, sample, params) for sample in group.samples)
    group.samples = [part for parts in tasks for part in parts]
    stats.count_generated(group)
    to_score = [s for s in group.samples if s.status not in (Status.ABORTED, Status.FAILED)]
    with stats.scoring.running():
        return await context.scorer.score(to_score)


async def run_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run them concurrently. If one fails, the others are cancelled and awaited, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        first = _first_leaf(errors)
        raise first from first.__cause__
    return [task.result() for task in started]


async def within_deadline(work: Coroutine[Any, Any, T], timeout_s: float, ticket: Ticket, stats: RolloutStats) -> T:
    """Await ``work``; raises DeadlineError saying how far it came if it takes longer than ``timeout_s``."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeadlineError(
            f"the rollout took longer than {timeout_s:g} s: {stats.num_kept} of {ticket.num_groups} groups "
            f"were finished, {stats.drops_text()}, {stats.generated_tokens} tokens generated",
            where=ticket.task,
            hint="raise --rollout-timeout-s, or look at the engines and the rewards: perf/generate_time "
            f"{stats.generating.seconds:.1f} s, perf/reward_time {stats.scoring.seconds:.1f} s",
        ) from error


async def _generate_one(context: RolloutContext, sample: Sample, params: dict[str, Any]) -> list[Sample]:
    async with context.semaphore:
        if context.generate is None:
            return [await generate(context.args, sample, params)]
        return await _call_custom(context, sample, dict(params))


async def _call_custom(context: RolloutContext, sample: Sample, params: dict[str, Any]) -> list[Sample]:
    assert context.generate is not None
    where = f"generate function {context.args.custom_generate_function_path!r}, row {sample.row_id}"
    uid, sample_index = sample.uid, sample.sample_index
    try:
        call = partial(context.generate, context.args, sample, params)
        answer = await call_user(context.generate, call)
    except BufferRLError:
        raise
    except Exception as error:  # fault boundary: the user's code
        text = f"the generate function raised {type(error).__name__}: {error}\n{traceback_tail(error)}"
        raise RolloutError(text, where=where) from error
    parts = [answer] if isinstance(answer, Sample) else answer
    if not isinstance(parts, list) or not parts or not all(isinstance(part, Sample) for part in parts):
        raise RolloutError(f"it returned {type(answer).__name__}", where=where, expected="a Sample, or a list of them")
    for number, part in enumerate(parts):
        part.uid, part.sample_index, part.part = uid, sample_index, number
        if part.status is Status.PENDING:
            raise RolloutError(
                "it left sample.status pending", where=where, expected="completed, truncated, aborted or failed"
            )
    return parts


def _first_leaf(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
