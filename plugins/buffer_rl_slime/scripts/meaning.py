"""What a flag of another project is here, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from buffer_rl.options.values import Raw


class Verdict(StrEnum):
    """What a flag of another project is here."""

    SAME = "same"
    RENAMED = "renamed"
    NOT_NEEDED = "not needed"
    CHANGES = "changes the result"
    NOT_YET = "not there yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A flag with a value: its verdict, the reason, and for a renamed one the options and values that it stands for."""

    verdict: Verdict
    why: str
    options: tuple[tuple[str, str], ...] = ()


Judgement = tuple[Verdict, str, dict[str, Raw]]
"""The verdict for one flag of a launch command, the reason, and the options that it becomes."""
