"""How user code's failures are recorded and shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from buffer_rl.errors import RewardError
from buffer_rl.resolution.calls import traceback_tail

__all__ = ["COSTLY", "FailureKind", "RewardFailure", "traceback_tail"]


class FailureKind(StrEnum):
    """Why a reward could not be computed."""

    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    CRASH = "crash"
    INVALID = "invalid"


COSTLY = frozenset({FailureKind.TIMEOUT, FailureKind.CRASH})  # each costs a deadline, or the start of a process


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """One sample without a reward: why, and the error that says so in full."""

    kind: FailureKind
    error: RewardError
