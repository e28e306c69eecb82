"""How user code's failures are recorded and shown."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import StrEnum

from buffer_rl.errors import RewardError

TAIL_LINES = 12


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


def traceback_tail(error: BaseException, *, skip_frames: int = 1) -> str:
    """The last lines of the traceback, without the first ``skip_frames`` frames (the caller's own)."""
    frames = error.__traceback__
    for _ in range(skip_frames):
        if frames is not None and frames.tb_next is not None:
            frames = frames.tb_next
    lines = "".join(traceback.format_exception(type(error), error, frames)).rstrip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
