"""JSON text in data files: a line of JSONL, and the texts of JSON that fields of a row may hold."""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_DEPTH = 128
"""Levels of a value. What is written of samples later is limited too, to some 250."""
_TOO_DEEP = "nested too deeply"


def json_value(text: str) -> Any:
    """The value of a JSON text. Raises ``ValueError`` with the reason: also for a key that comes twice in one object,
    for NaN and the infinities, and for more than ``MAX_DEPTH`` levels."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_mapping)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    # Counting is quick, and hardly a row has so many brackets at all.
    if text.count("{") + text.count("[") > MAX_DEPTH and depth(value) > MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    return value


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} comes twice in one object")
    return found


def depth(value: Any) -> int:
    """The levels of lists and objects in a JSON value."""
    levels, level = 0, [value]
    while level := [item for item in level if isinstance(item, list | dict)]:
        levels += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return levels


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
