"""What can go wrong with an attempt at a group, and whose fault it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from buffer_rl.errors import BufferRLError, DataError, DeadlineError, EngineError, RewardError, RolloutError

PASSING_STATUS = frozenset({408, 425, 429})  # the only HTTP 4xx that another try may end otherwise
REFUSED_PROMPT = frozenset({400, 413, 414, 422})  # the request is wrong; an engine's other 4xx say that the set-up is
STALE_WEIGHTS = "stale_weights"  # tokens of other weights than the step's: whatever the prompt is
CONVERSION_FAILED = "conversion_failed"
GENERATE_TIMEOUT = "generate_timeout"
UNUSABLE = (RolloutError, DataError, RewardError)
"""What the conversion of a group raises where the group, or the user's code that converts it, is at fault."""


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


class GenerateTimeoutError(RolloutError):
    """A call of the user's generate function took longer than it may. repeatable: whether there is time for another."""

    def __init__(self, what: str, *, where: str = "", expected: str = "", hint: str = "") -> None:
        super().__init__(what, where=where, expected=expected, hint=hint)
        self.repeatable = True


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

    @classmethod
    def of_conversion(cls, error: BufferRLError) -> AttemptFailure:
        """A group that was generated and scored, and of which no rows can be made."""
        return cls(domain=Domain.DATA, reason=CONVERSION_FAILED, error=error)

    @property
    def is_costly(self) -> bool:
        """Whether the attempt took a whole deadline, or the start of a process."""
        return self.reward in COSTLY or self.reason == GENERATE_TIMEOUT


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an exception bears, as those of this project and of the usual HTTP libraries do."""
    of_aiohttp, of_httpx = getattr(error, "status", None), getattr(error, "response", None)
    for value in (of_aiohttp, getattr(of_httpx, "status_code", None)):
        if isinstance(value, int) and not isinstance(value, bool):
            return int(value)
    return None


def is_refusal(status: int | None) -> bool:
    """Whether an HTTP status says that asking again is of no use."""
    return status is not None and 400 <= status < 500 and status not in PASSING_STATUS


def kind_of(error: BaseException) -> FailureKind:
    """What an exception of a reward function is; an HTTP refusal where it bears such a status."""
    return FailureKind.REFUSED if is_refusal(status_of(error)) else FailureKind.EXCEPTION


def failure_of(error: BufferRLError) -> AttemptFailure | None:
    """The failure that ``error`` of the generation is; None for one that must end the run, such as a wrong option.

    An engine is the set-up's; whatever else refuses a request, such as a tool, may do so for one prompt alone."""
    if is_refusal(error.status):
        if isinstance(error, EngineError) and error.status not in REFUSED_PROMPT:
            return None
        reason = f"refused:{error.status}"
        return AttemptFailure(domain=Domain.DATA, reason=reason, error=error, repeatable=False)
    if isinstance(error, EngineError | DeadlineError):
        reason = "deadline" if isinstance(error, DeadlineError) else "engine"
        return AttemptFailure(domain=Domain.INFRA, reason=reason, error=error)
    if isinstance(error, GenerateTimeoutError):
        repeatable = error.repeatable
        return AttemptFailure(domain=Domain.DATA, reason=GENERATE_TIMEOUT, error=error, repeatable=repeatable)
    if isinstance(error, UNUSABLE):
        return AttemptFailure(domain=Domain.DATA, reason="generate_failed", error=error)
    return None
