"""Calls a rollout function of the user's and makes a ``RolloutOutput`` of what it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from buffer_rl.contract_check import as_leased_group, check_rollout_output, check_statuses
from buffer_rl.contracts import RolloutBuffer
from buffer_rl.errors import BufferRLError, RolloutError
from buffer_rl.resolution.calls import traceback_tail
from buffer_rl.resolution.signature import call_rollout
from buffer_rl.rollout.calling import call_user
from buffer_rl.rollout.evaluate import eval_metrics
from buffer_rl.rollout.slime_evaluation import read_evaluation
from buffer_rl.rollout.stats import RolloutStats, rewards_of
from buffer_rl.types import GroupUid, RolloutOutput, Sample, SampleGroup

GRACE_S = 30.0
"""The built-in functions keep the deadline themselves, and say more when it passes; this one is for all others."""


class LeaseRecorder:
    """A ``RolloutBuffer`` that remembers what it leased, so that plain lists of samples are groups again, and that
    checks the status of each sample that is reported.

    groups: the leases by uid, the last one of each. finished: the groups that were reported as such. where: of the
    errors. Everything that is not here is the buffer's own.
    """

    def __init__(self, buffer: RolloutBuffer, where: str) -> None:
        self._buffer = buffer
        self._where = where
        self.groups: dict[GroupUid, SampleGroup] = {}
        self.finished: dict[GroupUid, SampleGroup] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """Lease groups."""
        return self._record(self._buffer.get_samples(num_samples))

    async def aget_samples(self, num_samples: int) -> list[SampleGroup]:
        """Lease groups."""
        return self._record(await self._buffer.aget_samples(num_samples))

    def add_samples(self, groups: Sequence[SampleGroup | Sequence[Sample]]) -> None:
        """Give leased groups back; a list of a group's samples stands for the group."""
        self._buffer.add_samples([self._group(group) for group in groups])

    async def aadd_samples(self, groups: Sequence[SampleGroup | Sequence[Sample]]) -> None:
        """Give leased groups back; a list of a group's samples stands for the group."""
        await self._buffer.aadd_samples([self._group(group) for group in groups])

    def encode(self, group: SampleGroup) -> Any:
        """What ``finish`` would store of a group."""
        check_statuses(group, where=self._where)
        return self._buffer.encode(group)

    def finish(self, group: SampleGroup, encoded: Any = None) -> None:
        """Report a finished group."""
        check_statuses(group, where=self._where)
        self._buffer.finish(group, encoded)
        self.finished[group.uid] = group

    async def afinish(self, group: SampleGroup, encoded: Any = None) -> None:
        """Report a finished group."""
        check_statuses(group, where=self._where)
        await self._buffer.afinish(group, encoded)
        self.finished[group.uid] = group

    def _record(self, groups: list[SampleGroup]) -> list[SampleGroup]:
        self.groups.update((group.uid, group) for group in groups)
        return groups

    def _group(self, group: object) -> SampleGroup:
        found = as_leased_group(group, self.groups)
        if found is None:
            raise RolloutError(
                f"{type(group).__name__} is no leased group",
                where="buffer.add_samples",
                expected="groups of this rollout",
            )
        check_statuses(found, where=self._where)
        return found


async def run_user_rollout(
    function: Callable[..., Any], args: Any, buffer: RolloutBuffer, *, where: str
) -> RolloutOutput:
    """The checked output of ``function`` for ``buffer.ticket``, with the metrics of ``finished_metrics``.

    Raises RolloutError, naming ``where``, if the function raises, returns something else, or is not done at
    ``--rollout-timeout-s`` and a grace.
    """
    recorder: Any = LeaseRecorder(buffer, where)
    ticket = buffer.ticket
    call = partial(call_rollout, function, args, ticket.rollout_id, recorder, ticket.evaluation)
    deadline = asyncio.timeout(args.rollout_timeout_s + GRACE_S)
    try:
        async with deadline:
            answer = await call_user(function, call)
        if ticket.evaluation:
            answer = read_evaluation(answer, args, recorder.groups, where=where)
        output = check_rollout_output(answer, where=where, leased=recorder.groups)
        finished = {group.uid: group for group in output.groups} | recorder.finished
        output.metrics |= finished_metrics(args, ticket.evaluation, finished.values(), output.metrics)
        return output
    except BufferRLError:
        raise
    except Exception as error:  # the boundary to user code: name it, and keep its traceback
        if isinstance(error, TimeoutError) and deadline.expired():
            raise RolloutError(f"not done within {args.rollout_timeout_s:g} s", where=where) from error
        text = f"the rollout function raised {type(error).__name__}: {error}\n{traceback_tail(error)}"
        raise RolloutError(text, where=where) from error


def finished_metrics(
    args: Any, evaluation: bool, groups: Iterable[SampleGroup], given: Mapping[str, float]
) -> dict[str, float]:
    """Reward, lengths and truncation of finished groups under the built-in rollout's names, as far as the ``given``
    metrics of the rollout function lack them. For ``sft_loss``, whose rewards mean nothing, lengths alone."""
    ordered = sorted(groups, key=lambda group: group.uid)
    stats = RolloutStats()
    try:
        if evaluation:  # under names of its own where the function gives scores
            return {} if any(name.startswith("eval/") for name in given) else eval_metrics(args, ordered)
        for group in ordered:
            stats.count_kept(group, rewards_of(args, group))
    except (TypeError, ValueError):  # lengths that are no numbers: what finishes the groups says which
        return {}
    names = {name.removeprefix("rollout/") for name in given}
    return {
        name: value
        for name, value in stats.metrics_of_kept().items()
        if name not in names and (args.loss_type != "sft_loss" or name.startswith("response_len/"))
    }
