"""What a flag of another project is here, as data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources

import yaml

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why flags have a verdict whatever their values. flags: their names, without dashes. prefixes: of further ones."""

    verdict: Verdict
    why: str
    flags: tuple[str, ...]
    prefixes: tuple[str, ...]


@functools.cache
def reasons() -> tuple[Reason, ...]:
    """Those of ``flags.yaml``, in its order."""
    tables = yaml.safe_load(resources.files("buffer_rl_slime.scripts").joinpath("flags.yaml").read_text("utf-8"))
    rows = [(Verdict(verdict), row) for verdict, rows in tables.items() for row in rows]
    return tuple(
        Reason(verdict=v, why=row["why"], flags=tuple(row["flags"].split()), prefixes=tuple(row.get("prefixes", ())))
        for v, row in rows
    )
