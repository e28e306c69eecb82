"""Evaluation on held-out prompts: the training path with evaluation's sampling parameters and no filter."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import comb
from statistics import fmean

import numpy as np

from buffer_rl.args import Args
from buffer_rl.errors import BufferRLError, RolloutError
from buffer_rl.kinds.rollout import RolloutBuffer
from buffer_rl.records.groups import RolloutOutput, SampleGroup, Status
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.failure_policy import DATA_ATTEMPTS, FailurePolicy
from buffer_rl.rollout.failures import GROUP_ERRORS, AttemptFailure, Domain, failure_of
from buffer_rl.rollout.generate import sampling_params_for
from buffer_rl.rollout.lease import Lease
from buffer_rl.rollout.production import generate_group, run_all, score_group, within_deadline
from buffer_rl.rollout.requests import Requests
from buffer_rl.rollout.stats import RolloutStats, known_means, reward_entries, rewards_of
from buffer_rl.rollout.user_functions import UNNAMED

WITHOUT_ANSWER = (Status.ABORTED, Status.FAILED)
_OF_A_SET = {"raw_reward": "", "response_len/mean": "/response_len", "truncated_ratio": "/truncated"}
"""What is told of an evaluation set, of the metrics of its groups, and how its name ends there."""


async def evaluate(context: RolloutContext, buffer: RolloutBuffer) -> RolloutOutput:
    """Produce and finish every group of the evaluation. Metrics: see ``eval_metrics``.

    Raises RolloutError if a sample is aborted, or cannot be generated or
    scored at the second attempt (a mean over the rest would not be comparable), DeadlineError at its
    deadline (``ticket_deadline``).
    """
    run = _Evaluation(context, buffer)
    await within_deadline(run.produce_all(), context.args, buffer, run.stats)
    return RolloutOutput(metrics=eval_metrics(context.args, run.groups))


def eval_metrics(args: Args, groups: Iterable[SampleGroup]) -> dict[str, float]:
    """By data set ``eval/{name}`` mean reward, ``eval/{name}/response_len`` mean, ``eval/{name}/truncated`` share,
    ``eval/{name}/{entry}``, the mean of each number of rewards that are mappings, and of each reward that rows chose,
    and ``eval/{name}/pass_at_{k}``, see ``pass_rates``.

    Means over samples, of which each counts once, with the mean of its parts. A set without rewards is left out."""
    by_name: dict[str, RolloutStats] = defaultdict(RolloutStats)
    entries: dict[str, list[float]] = defaultdict(list)
    means: dict[str, list[list[float]]] = defaultdict(list)
    for group in groups:
        of_set, rewards = group.data_set or UNNAMED, rewards_of(args, group)
        means[of_set].append(known_means(group, rewards))
        by_name[of_set].count_kept(group, rewards)
        for rows in group.by_sample():
            for entry, numbers in reward_entries(rows).items():
                if numbers:
                    entries[f"eval/{of_set}/{entry}"].append(float(np.mean(sorted(numbers))))
    values = {name: float(np.mean(sorted(found))) for name, found in entries.items()}
    for name, of_prompts in means.items():
        values |= {f"eval/{name}/pass_at_{k}": share for k, share in pass_rates(of_prompts).items()}
    for name, stats in by_name.items():
        kept = stats.metrics_of_kept()
        values |= {f"eval/{name}{end}": kept[metric] for metric, end in _OF_A_SET.items() if stats.rewards}
    return values


def pass_rates(rewards: Sequence[Sequence[float]]) -> dict[int, float]:
    """pass@k of a set by k = 2, 4, 8, … up to the samples of a prompt: the expected share of prompts with a right one
    among k of their samples, 1 - C(wrong, k) / C(samples, k) (arXiv 2107.03374, equation 1). Empty unless every reward
    is 0 or 1. rewards: of the samples of each prompt; the prompt with the fewest decides how far k goes."""
    if not {reward for prompt in rewards for reward in prompt} <= {0.0, 1.0}:
        return {}
    fewest = min(map(len, rewards), default=0)
    return {
        k: fmean(1 - comb(prompt.count(0.0), k) / comb(len(prompt), k) for prompt in rewards)
        for k in (1 << power for power in range(1, fewest.bit_length()))
    }


class _Evaluation:
    """One evaluation in progress."""

    def __init__(self, context: RolloutContext, buffer: RolloutBuffer) -> None:
        self.stats = RolloutStats()
        self._context = context
        self._buffer = buffer
        self._failures = FailurePolicy(context, buffer, self.stats)
        self._params = sampling_params_for(context.args, evaluation=True)
        self.groups: list[SampleGroup] = []

    async def produce_all(self) -> None:
        while groups := await self._buffer.aget_samples(max(1, self._buffer.ticket.num_groups)):
            self.groups.extend(groups)
            await run_all(self._produce_one(group) for group in groups)

    async def _produce_one(self, group: SampleGroup) -> None:
        attempts = 0  # that failed in this evaluation; the Buffer counts over all evaluations, whose uids are equal
        while (failure := await self._attempt(group)) is not None:
            total, _ = await self._failures.count(group, failure)
            self._failures.check_budget(failure, total)
            attempts += failure.domain is Domain.DATA
            if failure.domain is Domain.DATA and not self._may_repeat(failure, attempts):
                if failure.reward is None:
                    raise failure.error
                what = f"an evaluation sample could not be scored ({failure.reward}): {failure.error.what}"
                raise RolloutError(what, where=failure.error.where, expected=failure.error.expected) from failure.error
            group.samples = group.as_prompts().samples
            await asyncio.sleep(self._failures.pause_s)
        self._failures.succeeded(group)
        self.stats.count_kept(group, rewards_of(self._context.args, group))

    async def _attempt(self, group: SampleGroup) -> AttemptFailure | None:
        """Generate, score and finish the group. Returns its failure, if any. Raises errors that must end the run."""
        params = self._params | group.sampling_params
        try:
            await generate_group(Lease.of(self._context, self._buffer, group, Requests()), params, self.stats)
            failures = await score_group(self._context, group, self.stats)
        except BufferRLError as error:
            return failure_of(error)
        if failures:
            return failures[0]
        for sample in group:
            if sample.status in WITHOUT_ANSWER:
                raise RolloutError(f"an evaluation sample was {sample.status}", where=f"row {sample.row_id}")
        try:
            await self._buffer.afinish(group)
        except GROUP_ERRORS as error:
            return AttemptFailure.of_conversion(error)
        return None

    def _may_repeat(self, failure: AttemptFailure, attempts: int) -> bool:
        retries = failure.reward is None or self._context.args.on_reward_error == "retry"
        return failure.repeatable and retries and attempts < DATA_ATTEMPTS
