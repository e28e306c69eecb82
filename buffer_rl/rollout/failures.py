"""Failures of an attempt at a group: kinds, domains (infrastructure or data), and how exceptions map to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from buffer_rl.errors import BufferRLError, DataError, DeadlineError, EngineError, RewardError, RolloutError
from buffer_rl.kinds.reward import Abstain

RETRYABLE_STATUS = frozenset({408, 425, 429})  # the only HTTP 4xx after which a retry may succeed
REFUSED_PROMPT = frozenset({400, 413, 414, 422})  # the request is wrong; an engine's other 4xx say that the set-up is
STALE_WEIGHTS = "stale_weights"  # tokens of other weights than the step's: whatever the prompt is
CONVERSION_FAILED = "conversion_failed"
GENERATE_TIMEOUT = "generate_timeout"
GROUP_ERRORS = (RolloutError, DataError, RewardError)
"""Errors of the conversion of a group that are the fault of the group, or of the user's code that converts it."""


class FailureKind(StrEnum):
    """Why a reward could not be computed."""

    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    CRASH = "crash"
    INVALID = "invalid"
    REFUSED = "refused"  # HTTP 4xx of a reward server
    ABSTAINED = "abstained"  # it does not judge the sample, which is no failure


COSTLY = frozenset({FailureKind.TIMEOUT, FailureKind.CRASH})  # each costs a deadline, or the start of a process


class GenerateTimeoutError(RolloutError):
    """A call of the user's generate function exceeded its deadline. repeatable: whether there is time for another."""

    repeatable = True


class Domain(StrEnum):
    """The cause of a failed attempt; each domain has its own budget."""

    INFRA = "infra"  # engines, network, weights: the same group succeeds elsewhere or later
    DATA = "data"  # the prompt, or its reward


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """A failed attempt at a group.

    reason: a short name, for the ledger. reward: how the reward failed, where the reward is what failed. repeatable:
    whether a second attempt may succeed.
    """

    domain: Domain
    reason: str
    error: BufferRLError
    reward: FailureKind | None = None
    repeatable: bool = True

    @classmethod
    def of_reward(cls, kind: FailureKind, error: RewardError) -> AttemptFailure:
        """A sample without a reward, and so its group."""
        reason, repeatable = f"reward_failed:{kind}", kind is not FailureKind.REFUSED
        return cls(domain=Domain.DATA, reason=reason, error=error, reward=kind, repeatable=repeatable)

    @classmethod
    def of_conversion(cls, error: BufferRLError) -> AttemptFailure:
        """A group that was generated and scored, but cannot be converted to rows."""
        return cls(domain=Domain.DATA, reason=CONVERSION_FAILED, error=error)

    @property
    def is_costly(self) -> bool:
        """Whether the attempt cost a whole deadline, or the start of a process."""
        return self.reward in COSTLY or self.reason == GENERATE_TIMEOUT


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an exception of this project or of a common HTTP library; None if it has none."""
    of_aiohttp, of_httpx = getattr(error, "status", None), getattr(error, "response", None)
    for value in (of_aiohttp, getattr(of_httpx, "status_code", None)):
        if isinstance(value, int) and not isinstance(value, bool):
            return int(value)
    return None


def is_refusal(status: int | None) -> bool:
    """Whether an HTTP status says that a retry is useless."""
    return status is not None and 400 <= status < 500 and status not in RETRYABLE_STATUS


def kind_of(error: BaseException) -> FailureKind:
    """The kind of an exception of a reward function: ABSTAINED of ``Abstain``, REFUSED if it has the HTTP status of a
    refusal."""
    if isinstance(error, Abstain):
        return FailureKind.ABSTAINED
    return FailureKind.REFUSED if is_refusal(status_of(error)) else FailureKind.EXCEPTION


def failure_of(error: BufferRLError) -> AttemptFailure:
    """The failure that an error of the generation means. Raises the error if it must end the run, as a wrong option.

    An engine that refuses a request for other reasons than its prompt is set up wrongly, which ends the run; a tool may
    refuse the request of one prompt alone."""
    if is_refusal(error.status):
        if isinstance(error, EngineError) and error.status not in REFUSED_PROMPT:
            raise error
        return AttemptFailure(domain=Domain.DATA, reason=f"refused:{error.status}", error=error, repeatable=False)
    if isinstance(error, EngineError | DeadlineError):
        reason = "deadline" if isinstance(error, DeadlineError) else "engine"
        return AttemptFailure(domain=Domain.INFRA, reason=reason, error=error)
    if isinstance(error, GenerateTimeoutError):
        repeatable = error.repeatable
        return AttemptFailure(domain=Domain.DATA, reason=GENERATE_TIMEOUT, error=error, repeatable=repeatable)
    if isinstance(error, GROUP_ERRORS):
        return AttemptFailure(domain=Domain.DATA, reason="generate_failed", error=error)
    raise error
