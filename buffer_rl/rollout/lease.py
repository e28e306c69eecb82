"""The lease that generating code works on, as a value; ``current_lease()`` gives it to functions of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Ticket

if TYPE_CHECKING:
    from buffer_rl.kinds.rollout import RolloutBuffer
    from buffer_rl.rollout.context import RolloutContext
    from buffer_rl.rollout.requests import Requests

NO_CONTEXT = "there is no rollout context here"
_LEASE: ContextVar[Lease | None] = ContextVar("buffer_rl_lease", default=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lease:
    """One attempt at a group, for everything that generates its samples; or a rollout as a whole, without a group.

    context: what rollout functions share. ticket, buffer: those of the rollout; None in a script.
    group, attempt: what is leased, and the number of this attempt, from 1. requests: the running ones of the rollout.
    numbers: of the responses that were requested during this attempt. Without a group, the last two are None.

    Example:
        lease = current_lease()
        if lease.stopped: ...
    """

    context: RolloutContext
    ticket: Ticket | None = None
    group: SampleGroup | None = None
    attempt: int = 1
    requests: Requests | None = None
    numbers: RequestNumbers | None = None
    buffer: RolloutBuffer | None = None

    @classmethod
    def of(cls, context: RolloutContext, buffer: RolloutBuffer, group: SampleGroup, requests: Requests) -> Lease:
        """The lease of ``group``, which ``buffer`` gave out. The next attempt asks under the same seeds again."""
        return cls(
            context=context,
            ticket=buffer.ticket,
            group=group,
            attempt=group.attempt,
            requests=requests,
            numbers=RequestNumbers(),
            buffer=buffer,
        )

    @property
    def evaluation(self) -> bool:
        """Whether the group is of an evaluation."""
        return self.ticket is not None and self.ticket.evaluation

    @property
    def stopped(self) -> bool:
        """Whether the rollout has enough groups: what is not generated yet must end as ``aborted``."""
        return self.requests is not None and self.requests.stopped

    def count(self, name: str, number: float = 1) -> None:
        """Add to what a generate function counts of the rollout, under ``name``; nothing in an evaluation."""
        if self.ticket is not None and not self.ticket.evaluation:
            self.context.counts[self.ticket.task][name] += number  # type: ignore[assignment]

    def request_id(self, name: str) -> str:
        """The ``rid`` of the request ``name``. A repeated lease of a row gets new ids, so that an engine never answers
        it from an earlier request."""
        if self.group is None or self.ticket is None:
            return f":{name}:1:"
        return f"{self.ticket.task}:{name}:{self.attempt}:{self.group.incarnation or self.ticket.incarnation}"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the lease that ``current_lease()`` returns, here and in tasks started from here."""
        token = _LEASE.set(self)
        try:
            yield
        finally:
            _LEASE.reset(token)


def lease_or_none() -> Lease | None:
    """What ``current_lease`` returns; None outside a rollout."""
    return _LEASE.get()


def current_lease() -> Lease:
    """The lease that the calling function of the user's works on. Raises RolloutError outside a rollout."""
    lease = _LEASE.get()
    if lease is None:
        raise RolloutError(
            NO_CONTEXT,
            expected="a call from a rollout, generate or evaluation function that buffer_rl runs",
            hint="in a script or test: with RolloutContext.build(args, registry=..., engine=...).active(): ...; "
            "a thread of your own needs contextvars.copy_context()",
        )
    return lease


class RequestNumbers:
    """Numbers the responses that are requested during one attempt at a group, for their seeds and request ids.

    Each row counts from 0, in the order of the calls. A response that continues, for example with its next turn, keeps
    its number: its request starts at a later position.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[GroupUid | None, int, int], int] = {}
        # By id(sample); holding the sample keeps the id unique: its row, the position of its last request, its number.
        self._last: dict[int, tuple[Sample, tuple[GroupUid | None, int, int], int, int]] = {}

    def number(self, sample: Sample) -> int:
        """The number of the response that ``sample`` requests now."""
        row, position = (sample.uid, sample.sample_index, sample.part), sample.response_length
        last = self._last.get(id(sample))
        if last is not None and last[1] == row and position > last[2]:
            number = last[3]
        else:
            number = self._next.get(row, 0)
            self._next[row] = number + 1
        self._last[id(sample)] = sample, row, position, number
        return number
