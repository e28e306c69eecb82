"""Calls a rollout function of the user's and makes a ``RolloutOutput`` of what it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from buffer_rl.contract_check import as_leased_group, check_rollout_output
from buffer_rl.contracts import RolloutBuffer
from buffer_rl.errors import BufferRLError, RolloutError
from buffer_rl.resolution.calls import traceback_tail
from buffer_rl.resolution.signature import call_rollout
from buffer_rl.rollout.calling import call_user
from buffer_rl.rollout.slime_evaluation import read_evaluation
from buffer_rl.types import GroupUid, RolloutOutput, Sample, SampleGroup

GRACE_S = 30.0
"""The built-in functions keep the deadline themselves, and say more when it passes; this one is for all others."""


class LeaseRecorder:
    """A ``RolloutBuffer`` that remembers what it handed out, so that plain lists of samples are groups again.

    groups: the leases by uid, the last one of each. Everything that is not here is the buffer's own.
    """

    def __init__(self, buffer: RolloutBuffer) -> None:
        self._buffer = buffer
        self.groups: dict[GroupUid, SampleGroup] = {}

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
        return found


async def run_user_rollout(
    function: Callable[..., Any], args: Any, buffer: RolloutBuffer, *, where: str
) -> RolloutOutput:
    """The checked output of ``function`` for ``buffer.ticket``.

    Raises RolloutError, naming ``where``, if the function raises, returns something else, or is not done at
    ``--rollout-timeout-s`` and a grace.
    """
    recorder: Any = LeaseRecorder(buffer)
    ticket = buffer.ticket
    call = partial(call_rollout, function, args, ticket.rollout_id, recorder, ticket.evaluation)
    deadline = asyncio.timeout(args.rollout_timeout_s + GRACE_S)
    try:
        async with deadline:
            answer = await call_user(function, call)
        if ticket.evaluation:
            answer = read_evaluation(answer, args, recorder.groups, where=where)
        return check_rollout_output(answer, where=where, leased=recorder.groups)
    except BufferRLError:
        raise
    except Exception as error:  # the boundary to user code: name it, and keep its traceback
        if isinstance(error, TimeoutError) and deadline.expired():
            raise RolloutError(f"not done within {args.rollout_timeout_s:g} s", where=where) from error
        text = f"the rollout function raised {type(error).__name__}: {error}\n{traceback_tail(error)}"
        raise RolloutError(text, where=where) from error
