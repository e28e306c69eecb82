"""Evaluation sets as they are named on the command line: ``NAME=PATH``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from buffer_rl.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One evaluation set: its name in metrics, and its file (with a slice, perhaps)."""

    name: str
    path: str


def parse_eval_sets(texts: Sequence[str]) -> list[EvalSet]:
    """Read ``NAME=PATH`` texts. Raises ConfigError for a malformed text and a name that comes twice."""
    sets: dict[str, EvalSet] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (equals and path and _NAME.fullmatch(name)):
            raise ConfigError(
                f"{text!r} is no evaluation set",
                where="--eval-prompt-data",
                expected="NAME=PATH, the name of letters, digits, '_', '-' and '.'",
            )
        if name in sets:
            raise ConfigError(f"two evaluation sets have the name {name!r}", where="--eval-prompt-data")
        sets[name] = EvalSet(name=name, path=path)
    return list(sets.values())
