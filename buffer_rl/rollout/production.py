"""Generates and scores one group: the path that training and evaluation share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

from buffer_rl.args import Args
from buffer_rl.buffer.queue import DONE
from buffer_rl.engines.protocol import ROWS
from buffer_rl.errors import DeadlineError, RolloutError
from buffer_rl.kinds.rollout import RolloutBuffer, as_sample, check_statuses
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.calls import place, returned
from buffer_rl.plugin.signature import takes_evaluation
from buffer_rl.records.groups import Sample, SampleGroup, Status, VersionSpan
from buffer_rl.records.ids import version_number
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.deadlines import overdue, ticket_deadline, ticket_limit_s
from buffer_rl.rollout.failures import AttemptFailure, GenerateTimeoutError
from buffer_rl.rollout.generate import generate, generate_together, reset_to_prompt
from buffer_rl.rollout.lease import Lease
from buffer_rl.rollout.options import PLAY, generate_path
from buffer_rl.rollout.stats import RolloutStats, rewards_of, sampled_tokens
from buffer_rl.rollout.user_functions import call_plugin

T = TypeVar("T")
OF_SLIME: dict[str, Any] = {"stop": None, "stop_token_ids": None, "spaces_between_special_tokens": False}
"""What slime's generate functions find among their sampling parameters, where no option says otherwise."""


async def generate_group(lease: Lease, params: dict[str, Any], stats: RolloutStats) -> None:
    """Generate every sample of the lease's group in place; those that an earlier lease completed stay as they are.

    Raises what the generate function raised, as RolloutError unless it is one of ``buffer_rl.errors`` already; the
    group's other requests are cancelled and awaited first.
    """
    group, context = lease.group, lease.context
    assert group is not None
    num_before = sampled_tokens(group)
    # Samples of a function of the user's end one by one: none of them keeps its place free for others.
    size = min(ROWS, context.args.rollout_concurrency) if context.generate is None else 1
    with stats.generating.running():
        parts = await run_all(
            _generate_together(lease, group.samples[start : start + size], params)
            for start in range(0, len(group.samples), size)
        )
    group.samples = [part for samples_parts in parts for sample_parts in samples_parts for part in sample_parts]
    stats.count_generated(group, num_before)


async def score_group(context: RolloutContext, group: SampleGroup, stats: RolloutStats) -> list[AttemptFailure]:
    """Score the samples that were not aborted, in place; one that has a reward keeps it. Returns the failures."""
    to_score = [s for s in group.samples if s.status not in (Status.ABORTED, Status.FAILED)]
    scored = [sample for sample in to_score if not sample.__dict__.get("lowest_reward")]
    with stats.scoring.running():
        failures = await context.scorer.score(scored, of_set=group.rm_type)
    if len(scored) < len(to_score):
        _set_lowest(context.args, to_score, scored)
    return failures


def _set_lowest(args: Args, samples: list[Sample], scored: list[Sample]) -> None:
    """Of agents' samples that were cut at a limit: the lowest reward of the group, or 0 if none is below it."""
    lowest = min([0.0, *(reward for reward in rewards_of(args, scored) if reward is not None)])
    for sample in samples:
        if sample.__dict__.get("lowest_reward"):
            sample.reward = {args.reward_key: lowest} if args.reward_key else lowest


async def run_all(coroutines: Iterable[Coroutine[Any, Any, T]], *, of_user: bool = False) -> list[T]:
    """Run them concurrently. If one fails, the others are cancelled and awaited, and its error is raised.

    of_user: they call code of the user's, which may swallow the cancellation of its task."""
    coroutines = list(coroutines)
    if len(coroutines) == 1 and not of_user:  # needs no task of its own
        return [await coroutines[0]]
    async with task_group() as tasks:
        started = [tasks.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in started]


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises the first error alone, after the other tasks were cancelled and awaited."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        first = _first_leaf(errors)
        raise first from first.__cause__


async def within_deadline(work: Coroutine[Any, Any, T], args: Args, buffer: RolloutBuffer, stats: RolloutStats) -> T:
    """Await ``work`` on the ticket; raises DeadlineError with its progress at its deadline (``ticket_deadline``)."""
    ticket, deadline = buffer.ticket, None
    try:
        async with ticket_deadline(args, buffer) as deadline:
            return await work
    except TimeoutError as error:
        if deadline is None or not deadline.expired():
            raise
        raise DeadlineError(
            f"the rollout {overdue(args)}: {stats.num_kept} of {ticket.num_groups} groups "
            f"were finished, {stats.drops_text()}, {stats.generated_tokens} tokens generated",
            where=ticket.task,
            hint="raise --rollout-timeout-s, or look at the engines and the rewards: perf/generate_time "
            f"{stats.generating.seconds:.1f} s, perf/reward_time {stats.scoring.seconds:.1f} s",
            see="docs/troubleshooting.md#the-run-hangs",
        ) from error


async def _generate_together(lease: Lease, samples: list[Sample], params: dict[str, Any]) -> list[list[Sample]]:
    """The parts of each sample. All begin in the same moment, so that they can share a request; each frees its place
    when it is done."""
    context, held = lease.context, 0
    places = context.places

    async def one(sample: Sample) -> list[Sample]:
        nonlocal held
        if sample.status in DONE:
            return [sample]
        try:
            return await _generate_one(lease, sample, params)
        finally:
            held -= 1
            places.release()

    try:
        if wanted := sum(sample.status not in DONE for sample in samples):
            await places.acquire(wanted, evaluation=lease.evaluation)
            held = wanted
        is_new = context.generate is None and held == len(samples)
        if is_new and await generate_together(context.args, samples, params, lease):
            return [[sample] for sample in samples]
        return await run_all(map(one, samples), of_user=context.generate is not None)
    finally:
        places.release(held)  # of samples that were cancelled before they began


async def _generate_one(lease: Lease, sample: Sample, params: dict[str, Any]) -> list[Sample]:
    context = lease.context
    if context.generate is None:
        return [await generate(context.args, sample, params, lease)]
    if sample.status is Status.ABORTED and not getattr(context.generate, "continues_partial", False):
        sample = reset_to_prompt(sample)
    if lease.stopped:
        sample.status = Status.ABORTED
        return [sample]
    with lease.active():
        return await _call_custom(context, sample, {**OF_SLIME, **params}, lease.evaluation)


async def _call_custom(
    context: RolloutContext, sample: Sample, params: dict[str, Any], evaluation: bool
) -> list[Sample]:
    function = context.generate
    assert function is not None
    keywords = {"evaluation": evaluation} if takes_evaluation(function) else {}
    path, at = generate_path(context.args), f"row {sample.row_id}"
    where = place("generate", path, at)
    uid, sample_index = sample.uid, sample.sample_index
    # Each play of an agent has a deadline of its own, at which what there is counts.
    deadline = nullcontext() if path == PLAY else _generate_deadline(context.args, where)
    async with deadline:
        answer = await call_plugin(
            "generate", path, function, user_args(context.args), sample, params, at=at, **keywords
        )
    answers = [as_sample(part) for part in (answer if isinstance(answer, list) else [answer])]
    parts = [part for part in answers if isinstance(part, Sample)]
    if not parts or len(parts) < len(answers):
        raise returned("generate", path, answer, "a Sample, or a list of them", at=at, error_class=RolloutError)
    for number, part in enumerate(parts):
        part.uid, part.sample_index, part.part = uid, sample_index, number
        check_statuses([part], where=where)
        _number_versions(part)
        if part.status is Status.PENDING:
            expected = "completed, truncated, aborted or failed"
            raise RolloutError("it left sample.status pending", where=where, expected=expected)
    return parts


def _number_versions(sample: Sample) -> None:
    """Make one span of versions that are texts, ``meta_info["weight_version"]`` of each request, as slime keeps them:
    they do not say which tokens they are of, so all are of the oldest."""
    names: list[Any] = sample.weight_versions
    if names and all(isinstance(name, str) for name in names):
        oldest = min(version_number(name) for name in names)
        length = sample.response_length
        sample.weight_versions = [VersionSpan(oldest, 0, length)] if length else []


@asynccontextmanager
async def _generate_deadline(args: Args, where: str) -> AsyncIterator[None]:
    """The deadline of one call of the user's generate function: longer than one request's, because the function may
    make many; shorter than the ticket's, so that one prompt at which it hangs does not end the rollout."""
    ticket_s = ticket_limit_s(args)
    limit = args.custom_generate_timeout_s or ticket_s / 2
    deadline = asyncio.timeout(limit)
    try:
        async with deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        late = GenerateTimeoutError(
            f"not done within {limit:g} s",
            where=where,
            hint="a call may take --custom-generate-timeout-s, by default half of the rollout's deadline, which "
            "--rollout-timeout-s sets",
        )
        late.repeatable = 2 * limit < ticket_s
        raise late from error


def _first_leaf(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
