"""The default rollout function: leases groups, generates, scores and filters them until P are kept.

Who waits for whom: N slots run concurrently (``--over-sampling-batch-size``, by default P). A slot leases a group,
waits for its responses (each behind the context's places, then the engine), for its rewards and for the filter. A
kept group is finished and ends the slot; a dropped one is rejected and the slot leases the next.

With N = P, a group is leased only because one before it was dropped: the leased groups are always a prefix of the
data order, and the kept ones are the first P of that order that can be kept, however long each takes. There is no
surplus.

With N > P, the order of completion selects: the first P that are done and kept are trained on, so that a step does
not wait for the slowest. Then the requests of the others are aborted and awaited, and their groups are requeued: they
keep their place in the order of admission and come first in the next rollout. Nothing is lost, nothing counts as
dropped; but which groups a step trains on may differ from run to run, and slow ones come later.

After a failed attempt the rollout continues: the group is requeued or goes into quarantine (``FailurePolicy``), and the
slot leases the next one, which is the same group if it was requeued.
"""

from __future__ import annotations

import asyncio
import contextlib
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from buffer_rl.args import Args
from buffer_rl.buffer.queue import check_spans, check_versions, is_complete
from buffer_rl.errors import BufferRLError, RolloutError
from buffer_rl.kinds.rollout import RolloutBuffer
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.signature import takes
from buffer_rl.records.groups import RolloutOutput, SampleGroup, Status
from buffer_rl.rollout.baseline import baseline_of, greedy_group, set_baseline
from buffer_rl.rollout.context import RolloutContext, current_context
from buffer_rl.rollout.evaluate import evaluate
from buffer_rl.rollout.failure_policy import FailurePolicy
from buffer_rl.rollout.failures import GROUP_ERRORS, STALE_WEIGHTS, AttemptFailure, Domain, failure_of
from buffer_rl.rollout.generate import sampling_params_for
from buffer_rl.rollout.lease import Lease
from buffer_rl.rollout.production import generate_group, run_all, score_group, task_group, within_deadline
from buffer_rl.rollout.prompts import TOO_LONG
from buffer_rl.rollout.requests import Requests
from buffer_rl.rollout.stats import RolloutStats, rewards_of
from buffer_rl.rollout.user_functions import apply_filter

REPORT_S = 0.01
"""Between messages to the Buffer, of which each costs about a millisecond of its CPU and of this one's; and which it
works on while the next groups are scored."""
SCORING_GRACE_S = 2.0  # for rewards that are not needed any more
ABORTED, FAILED, ABSTAINED = "aborted", "generate_failed", "abstained"
_HINT = "the filter drops nearly everything: look at the rewards, or at the prompts' difficulty"
_HINTS = {
    TOO_LONG: "most prompts have more tokens than --rollout-max-prompt-len: raise it, or take these rows out",
    ABSTAINED: "the rewards abstain about most groups: look at what they say of the responses",
    ABORTED: "the generate function ends most groups as aborted, or without any reward",
    FAILED: "the generate function gives most groups the status failed",
}
"""What to look at, by the reason of most drops; of other reasons, which filters give, ``_HINT``."""


class DefaultRollout:
    """Generates and scores ``buffer.ticket.num_groups`` groups, and evaluates if ``evaluation``."""

    uses_engine = True
    concurrent = True

    def __init__(self, args: Args) -> None:
        self._args = args

    async def __call__(
        self, args: Args, rollout_id: int, buffer: RolloutBuffer, evaluation: bool = False
    ) -> RolloutOutput:
        """Report every group through ``buffer``; the output holds metrics only.

        Raises RolloutError if too many groups are dropped, DeadlineError at its deadline (``ticket_deadline``),
        what ``FailurePolicy.handle`` raises, and the first error that is not the fault of a group, such as a filter's.
        No task is left running then.
        """
        context = current_context()
        if evaluation:
            return await evaluate(context, buffer)
        run = _Run(context, buffer)
        await within_deadline(run.produce_all(), args, buffer, run.stats)
        return RolloutOutput(metrics=run.stats.metrics() | context.take_counts(buffer.ticket.task))


class _Phase(Enum):
    """What a slot waits for: an engine, rewards and filter, or something short."""

    GENERATING = auto()
    SCORING = auto()
    OTHER = auto()


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One of the groups in flight. ``group``: the leased group, None once it is reported."""

    group: SampleGroup | None
    encoded: Any = None  # the rows of a group that is kept, as the Buffer stores them
    ends: bool = False  # with the group that it has: a filter wants no other in its place
    phase: _Phase = _Phase.OTHER
    task: asyncio.Task[None] | None = None


class _Run:
    """One rollout in progress."""

    def __init__(self, context: RolloutContext, buffer: RolloutBuffer) -> None:
        self.context = context
        self.buffer = buffer
        self.stats = RolloutStats(has_filter=context.dynamic_filter is not None)
        self._args = context.args
        self._params = sampling_params_for(context.args, evaluation=False)
        self._wanted = buffer.ticket.num_groups
        self._requests = Requests()
        self._enough = asyncio.Event()
        self._num_kept = 0
        self._published = buffer.ticket.version  # the newest version that is known to be published
        self._failures = FailurePolicy(context, buffer, self.stats, self._enough)
        self._kept: list[SampleGroup] = []
        self._dropped: list[SampleGroup] = []
        self._spare = 0
        """Groups in flight that the step does not need: so many may be dropped without another in their place."""
        # Functions that see the whole rollout may change samples, so no group is done before all are.
        self._finishes_at_end = context.sample_filter is not None or context.all_samples_process is not None

    async def produce_all(self) -> None:
        in_flight = max(self._wanted, self._args.over_sampling_batch_size or 0)
        self._spare = in_flight - self._wanted
        slots = [_Slot(group=group) for group in await self._lease(in_flight)]
        async with task_group() as tasks:
            for slot in slots:
                slot.task = tasks.create_task(self._fill(slot))
            if in_flight > self._wanted:
                tasks.create_task(self._stop_when_enough(slots))
        await self._requeue([slot.group for slot in slots if slot.group is not None])
        if self._finishes_at_end:
            await self._finish_all()

    async def _lease(self, num_groups: int) -> list[SampleGroup]:
        groups = await self.buffer.aget_samples(num_groups)
        if len(groups) != num_groups:
            what = f"asked for {num_groups} groups, the buffer gave {len(groups)}"
            raise RolloutError(what, where=self.buffer.ticket.task)
        return groups

    async def _fill(self, slot: _Slot) -> None:
        """Attempt groups until one is kept; if enough are kept before that, the last group stays in the slot."""
        while (group := slot.group) is not None:
            result = await self._attempt(slot, group)
            if self._requests.stopped:
                return
            slot.group = None
            if not result:
                await self._keep(group, slot.encoded)
                return
            if isinstance(result, AttemptFailure):
                await self._handle_failure(group, result)
            else:
                await self.buffer.areject(group, result)
                self._count_drop(group, result)
                if slot.ends:
                    return
            if not self._requests.stopped:
                (slot.group,) = await self._lease(1)

    async def _handle_failure(self, group: SampleGroup, failure: AttemptFailure) -> None:
        """Requeue or quarantine a group that failed, and pause while the infrastructure is unhealthy."""
        if await self._failures.handle(group, failure):
            self._remember_dropped(group)
        if failure.domain is Domain.INFRA:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._failures.pause_s):
                    await self._enough.wait()

    async def _keep(self, group: SampleGroup, encoded: Any) -> None:
        self._num_kept += 1
        if self._num_kept == self._wanted:
            self._requests.stopped = True
            self._enough.set()
        if self._finishes_at_end:
            self._kept.append(group)
        else:
            await self._report_time()
            await self.buffer.afinish(group, encoded)
        self.stats.count_kept(group, rewards_of(self._args, group))
        if self.context.baseline:
            self.stats.baselines.append(baseline_of(group[0]))

    async def _report_time(self) -> None:
        """Wait until the next moment at which groups are reported, so that those of one time travel in one message;
        not any longer than until enough are kept."""
        moment = (asyncio.get_running_loop().time() // REPORT_S + 1) * REPORT_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(moment):
                await self._enough.wait()

    async def _attempt(self, slot: _Slot, group: SampleGroup) -> str | AttemptFailure:
        """Generate, score and filter the group. Returns an empty text if it is kept, else the reason or the failure."""
        greedy = [greedy_group(group)] if self.context.baseline else []
        slot.phase = _Phase.GENERATING
        try:
            if self.context.prompts.too_long(group[0], self._args.rollout_max_prompt_len):
                return TOO_LONG
            await run_all(self._generate(each) for each in (group, *greedy))
        except BufferRLError as error:
            if not self._requests.stopped:  # else the rollout does not need the answer any more
                return failure_of(error)
        finally:
            slot.phase = _Phase.OTHER
        if self._requests.stopped:
            return ""
        try:
            for each in (group, *greedy):
                check_versions(self.buffer.ticket, each, group.version)
                await self._check_published(each)
        except RolloutError as error:  # an engine that missed an update: its tokens may not be trained on
            return AttemptFailure(domain=Domain.INFRA, reason=STALE_WEIGHTS, error=error)
        slot.phase = _Phase.SCORING
        result = await self._score_and_filter(slot, group, greedy)
        slot.phase = _Phase.OTHER
        if result or self._requests.stopped:
            return result
        try:
            slot.encoded = self._encode(group)
        except GROUP_ERRORS as error:
            return AttemptFailure.of_conversion(error)
        self._failures.succeeded(group)
        return ""

    async def _generate(self, group: SampleGroup) -> None:
        params = self._params | group.sampling_params
        await generate_group(Lease.of(self.context, self.buffer, group, self._requests), params, self.stats)
        check_spans(group)

    async def _check_published(self, group: SampleGroup) -> None:
        """Raises RolloutError if an engine names a version that cannot have weights yet: the next one may be under way
        to the engines, no later one."""
        if not self.buffer.ticket.mixes_versions:  # then all are known to be that of the lease
            return
        newest = max((span.version for sample in group.rows for span in sample.weight_versions), default=0)
        if newest <= self._published + 1:
            return
        self._published = await self.buffer.aget_version()
        if newest > self._published + 1:
            what = f"response tokens are of weight version {newest}, and {self._published} is published"
            where = f"group {group.uid}, {self.buffer.ticket.task}"
            hint = "an engine reports versions of its own, or gets weights from elsewhere"
            raise RolloutError(what, where=where, expected=f"at most {self._published + 1}", hint=hint)

    def _encode(self, group: SampleGroup) -> Any:
        """The rows of a group that is kept; None where functions that see the whole rollout may still change it."""
        if not self._finishes_at_end:
            return self.buffer.encode(group)
        copied = [s.changed(**{name: copy(value) for name, value in vars(s).items()}) for s in group]
        self.buffer.encode(replace(group, samples=copied))  # the user's code in it may change samples, too
        return None

    async def _score_and_filter(
        self, slot: _Slot, group: SampleGroup, greedy: list[SampleGroup]
    ) -> str | AttemptFailure:
        """Score the generated group, and the ``greedy`` response to its prompt if there is one, and filter the group.
        Returns an empty text if it is kept, else the reason or the failure."""
        for failures in await run_all(score_group(self.context, each, self.stats) for each in (group, *greedy)):
            if failures:
                return failures[0]
        for status, reason in ((Status.ABORTED, ABORTED), (Status.FAILED, FAILED)):
            if any(sample.status is status and not sample.remove_sample for sample in group):
                return reason
        # A sample that the generate function gave up may have no reward: it is masked, and the rest of the group stays.
        scored = [sample for sample in group if sample.reward is not None]
        if not scored:
            return ABSTAINED if any("rewards_by_name" in sample.__dict__ for sample in group) else ABORTED
        for each in greedy:
            if reason := set_baseline(self._args, group, each):
                return reason
        judged = group if len(scored) == len(group) else replace(group, samples=scored)
        decision = await apply_filter(self.context.dynamic_filter, self._args, judged)
        if decision.keep:
            return ""
        if decision.keep_when_insufficient:
            if not self._spare:
                return ""
            self._spare -= 1
            slot.ends = True
        self._failures.succeeded(group)
        if not self._requests.stopped:  # else the group goes back to the queue
            self.stats.count_filtered(group, rewards_of(self._args, group))
        return decision.reason

    async def _stop_when_enough(self, slots: list[_Slot]) -> None:
        """End the slots that are not needed: abort their requests, and give their rewards a moment to end by
        themselves, since a reward process that is cancelled at work must be restarted."""
        await self._enough.wait()

        def in_phase(phase: _Phase) -> list[asyncio.Task[None]]:
            return [slot.task for slot in slots if slot.phase is phase and slot.task and not slot.task.done()]

        async def stop_scoring() -> None:
            if scoring := in_phase(_Phase.SCORING):
                _, late = await asyncio.wait(scoring, timeout=SCORING_GRACE_S)
                for task in late:
                    task.cancel()

        stop_generating = self._requests.stop(self.context.engine, lambda: in_phase(_Phase.GENERATING))
        await run_all([stop_generating, stop_scoring()])

    async def _requeue(self, groups: list[SampleGroup]) -> None:
        """Requeue the groups that are not needed, with what was generated of them."""
        num_complete = sum(map(is_complete, groups))
        self.stats.num_surplus_groups += num_complete
        self.stats.num_aborted_groups += len(groups) - num_complete
        if groups:
            await self.buffer.aadd_samples(groups)

    async def _finish_all(self) -> None:
        """Call the functions that see the whole rollout, with its groups sorted by uid, then finish the kept groups."""
        kept = sorted(self._kept, key=lambda group: group.uid)  # not in the order of time, which differs by run
        args, task = user_args(self._args), self.buffer.ticket.task
        async with self.context.at_end:
            if (chosen := self.context.sample_filter) is not None:
                marks = "marks samples with sample.remove_sample = True"
                await chosen.achange(args, kept, expected=marks, at=task)
            if (process := self.context.all_samples_process) is not None:
                everything = sorted([*kept, *self._dropped], key=lambda group: group.uid)
                more = [self.buffer] if takes(process.function, 3) else []  # slime's have it as their data source
                await process.achange(args, everything, *more, expected="changes samples in place", at=task)
        for group in kept:
            await self.buffer.afinish(group)

    def _count_drop(self, group: SampleGroup, reason: str) -> None:
        self.stats.drops[reason] += 1
        if reason != TOO_LONG:
            self._remember_dropped(group)
        hint = _HINTS.get(self.stats.drops.most_common(1)[0][0], _HINT)
        kept = f", {self.stats.num_kept} of {self._wanted} kept"
        see = "docs/troubleshooting.md#all-groups-are-dropped"
        self.stats.require_few_drops(self._args, self.buffer.ticket.task, hint, kept=kept, see=see)

    def _remember_dropped(self, group: SampleGroup) -> None:
        if self.context.all_samples_process is not None:
            self._dropped.append(group)
