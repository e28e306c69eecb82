"""The default rollout function: the first P groups in lease order that are scored and pass the filter.

Who waits for whom: P slots run concurrently. A slot leases a group, waits for its responses (each behind the
context's semaphore, then the engine), for its rewards and for the filter. A kept group is finished and ends the
slot; a dropped one is rejected and the slot leases the next. A group is thus leased only because one before it
was dropped: the leased groups are always a prefix of the data order, and the kept ones are the first P of that
order that can be kept, however long each takes. There is no surplus.
"""

from __future__ import annotations

from typing import Any

from buffer_rl.contracts import RolloutBuffer
from buffer_rl.errors import RolloutError
from buffer_rl.rollout.context import RolloutContext, current_context
from buffer_rl.rollout.evaluate import evaluate
from buffer_rl.rollout.failures import COSTLY, RewardFailure
from buffer_rl.rollout.filtering import apply_filter, apply_sample_filter
from buffer_rl.rollout.generate import sampling_params_for
from buffer_rl.rollout.production import produce, run_all, within_deadline
from buffer_rl.rollout.prompts import TOO_LONG
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.types import RolloutOutput, SampleGroup, Status

GIVE_UP_AFTER = 8  # groups that could not be scored, while none could
GIVE_UP_AFTER_COSTLY = 2  # where there are only time-outs and crashes: such groups take long


class DefaultRollout:
    """Generates and scores ``buffer.ticket.num_groups`` groups, and evaluates if ``evaluation``."""

    uses_engine = True

    def __init__(self, args: Any) -> None:
        self._args = args

    async def __call__(
        self, args: Any, rollout_id: int, buffer: RolloutBuffer, evaluation: bool = False
    ) -> RolloutOutput:
        """Report every group through ``buffer``; the output holds metrics only.

        Raises RolloutError if too many groups are dropped or cannot be scored, DeadlineError at
        ``--rollout-timeout-s``, and the first error of the engine or of the user's functions. Nothing that was
        started is left running then.
        """
        context = current_context()
        if evaluation:
            return await evaluate(context, buffer)
        run = _Run(context, buffer)
        await within_deadline(run.produce_all(), args.rollout_timeout_s, buffer.ticket, run.stats)
        return RolloutOutput(metrics=run.stats.metrics())


class _Run:
    """One rollout in progress."""

    def __init__(self, context: RolloutContext, buffer: RolloutBuffer) -> None:
        self.context = context
        self.buffer = buffer
        self.stats = RolloutStats()
        self._args = context.args
        self._params = sampling_params_for(context.args, evaluation=False)
        self._wanted = buffer.ticket.num_groups
        self._num_scored = 0
        self._held: list[SampleGroup] = []
        self._unscored: list[RewardFailure] = []

    async def produce_all(self) -> None:
        await run_all(self._fill_slot(group) for group in await self._lease(self._wanted))
        if self.context.sample_filter is not None:
            path = self._args.rollout_sample_filter_path
            self._held.sort(key=lambda group: group.uid)  # not in the order of time, which differs from run to run
            await apply_sample_filter(self.context.sample_filter, path, self._args, self._held, self.buffer.ticket.task)
            for group in self._held:
                await self.buffer.afinish(group)

    async def _lease(self, num_groups: int) -> list[SampleGroup]:
        groups = await self.buffer.aget_samples(num_groups)
        if len(groups) != num_groups:
            raise RolloutError(
                f"asked for {num_groups} groups, the buffer gave {len(groups)}", where=self.buffer.ticket.task
            )
        return groups

    async def _fill_slot(self, group: SampleGroup) -> None:
        while reason := await self._drop_reason(group):
            await self.buffer.areject(group, reason)
            self._count_drop(reason)
            (group,) = await self._lease(1)
        if self.context.sample_filter is None:
            await self.buffer.afinish(group)
        else:  # it sees the whole rollout, so no group is done before all are
            self._held.append(group)
        self.stats.count_kept(group, [sample.get_reward_value(self._args) for sample in group])

    async def _drop_reason(self, group: SampleGroup) -> str:
        """Produce the group; why it is not kept, or an empty text."""
        if self.context.prompts.too_long(group[0], self._args.rollout_max_prompt_len):
            return TOO_LONG
        failures = await produce(self.context, self.buffer.ticket, group, self._params, self.stats)
        if failures:
            self._count_unscored(failures[0])
            return f"reward_failed:{failures[0].kind}"
        for status, reason in ((Status.ABORTED, "aborted"), (Status.FAILED, "generate_failed")):
            if any(sample.status is status for sample in group):
                return reason
        self._num_scored += 1
        reference = self._args.dynamic_sampling_filter_path
        decision = await apply_filter(self.context.dynamic_filter, reference, self._args, group)
        return "" if decision.keep else decision.reason

    def _count_unscored(self, failure: RewardFailure) -> None:
        self._unscored.append(failure)
        count = len(self._unscored)
        costly = all(failure.kind in COSTLY for failure in self._unscored)
        enough = min(GIVE_UP_AFTER_COSTLY if costly else GIVE_UP_AFTER, self._wanted)
        hopeless = not self._num_scored and count >= enough
        if hopeless or count > self._wanted:
            first = self._unscored[0]
            raise RolloutError(
                f"the rewards of {count} groups could not be computed, those of {self._num_scored} could. "
                f"The first failure ({first.kind}):\n{first.error}",
                where=self.buffer.ticket.task,
                hint="what the reward function prints is in the logs of the run: logs/rollout_*",
            ) from first.error

    def _count_drop(self, reason: str) -> None:
        self.stats.drops[reason] += 1
        limit = self._args.dynamic_sampling_max_drops * self._wanted
        if self.stats.drops.total() > limit:
            raise RolloutError(
                f"{self.stats.drops_text()}, {self.stats.num_kept} of {self._wanted} kept",
                where=self.buffer.ticket.task,
                expected=f"at most {limit} drops (--dynamic-sampling-max-drops for each wanted group)",
                hint="the filter drops nearly everything: look at the rewards, or at the prompts' difficulty",
            )
