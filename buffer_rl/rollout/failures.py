"""What can go wrong with an attempt at a group, and whose fault it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from buffer_rl.errors import BufferRLError, DataError, DeadlineError, EngineError, RewardError, RolloutError
from buffer_rl.resolution.calls import traceback_tail

__all__ = [
    "COSTLY",
    "AttemptFailure",
    "Domain",
    "FailureKind",
    "RewardFailure",
    "failure_of",
    "is_refusal",
    "kind_of",
    "traceback_tail",
]

PASSING_STATUS = frozenset({408, 425, 429})  # the only HTTP 4xx that another try may end otherwise
REFUSED_PROMPT = frozenset({400, 413, 414, 422})  # the request is wrong; other 4xx say that the set-up is


class FailureKind(StrEnum):
    """Why a reward could not be computed."""

    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    CRASH = "crash"
    INVALID = "invalid"
    REFUSED = "refused"  # HTTP 4xx of a reward server


COSTLY = frozenset({FailureKind.TIMEOUT, FailureKind.CRASH})  # each costs a deadline, or the start of a process


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """One sample without a reward: why, and the error that says so in full."""

    kind: FailureKind
    error: RewardError


class Domain(StrEnum):
    """Whose fault a failed attempt is; each domain has a budget of its own."""

    INFRA = "infra"  # engines, network, weights: the same group succeeds elsewhere or later
    DATA = "data"  # the prompt, or its reward


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """An attempt at a group that came to nothing.

    reason: in short, for the ledger. reward: what became of the reward, where that is what failed. repeatable: whether
    a second attempt may end otherwise.
    """

    domain: Domain
    reason: str
    error: BufferRLError
    reward: FailureKind | None = None
    repeatable: bool = True

    @classmethod
    def of_reward(cls, failure: RewardFailure) -> AttemptFailure:
        """A group of which one reward is missing."""
        return cls(
            domain=Domain.DATA,
            reason=f"reward_failed:{failure.kind}",
            error=failure.error,
            reward=failure.kind,
            repeatable=failure.kind is not FailureKind.REFUSED,
        )


def is_refusal(status: int | None) -> bool:
    """Whether an HTTP status says that asking again is of no use."""
    return status is not None and 400 <= status < 500 and status not in PASSING_STATUS


def kind_of(error: BaseException) -> FailureKind:
    """What an exception of a reward function is; an HTTP refusal where the project's error says so."""
    refused = isinstance(error, BufferRLError) and is_refusal(error.status)
    return FailureKind.REFUSED if refused else FailureKind.EXCEPTION


def failure_of(error: BufferRLError) -> AttemptFailure | None:
    """The failure that ``error`` of the generation is; None for one that must end the run, such as a wrong option."""
    if is_refusal(error.status):
        if error.status not in REFUSED_PROMPT:
            return None
        reason = f"refused:{error.status}"
        return AttemptFailure(domain=Domain.DATA, reason=reason, error=error, repeatable=False)
    if isinstance(error, EngineError | DeadlineError):
        reason = "deadline" if isinstance(error, DeadlineError) else "engine"
        return AttemptFailure(domain=Domain.INFRA, reason=reason, error=error)
    if isinstance(error, RolloutError | DataError | RewardError):
        return AttemptFailure(domain=Domain.DATA, reason="generate_failed", error=error)
    return None
