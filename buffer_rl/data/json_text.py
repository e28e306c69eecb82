"""JSON text: a line of JSONL, the texts of JSON that fields of a row may hold, and the bodies of requests."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import orjson

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


class JSONError(ValueError):
    """A body that is no JSON, or is nested too deeply (``is_deep``)."""

    def __init__(self, what: str, *, is_deep: bool = False) -> None:
        super().__init__(what)
        self.is_deep = is_deep


def read_json(raw: bytes | bytearray | str) -> Any:
    """The value of a JSON text. Raises JSONError."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise JSONError(str(error), is_deep="depth" in error.msg) from error
    open_list, open_object = ("[", "{") if isinstance(raw, str) else (b"[", b"{")
    # Counting is quick, and hardly a body has so many brackets at all.
    if raw.count(open_list) + raw.count(open_object) > MAX_DEPTH and depth(value) > MAX_DEPTH:  # type: ignore[arg-type]
        raise JSONError(f"it has more than {MAX_DEPTH} levels", is_deep=True)
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


def with_arguments(messages: list[Any]) -> list[Any]:
    """Chat messages in which the arguments of tool calls that are text, the JSON of an object, are that object; the
    list itself if there are none.

    OpenAI's form has the text. Chat templates write it as JSON once more, or refuse it."""
    found = [_with_arguments(message) for message in messages]
    return messages if found == messages else found


def _with_arguments(message: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return {**message, "tool_calls": [_decoded_call(call) for call in calls]} if isinstance(calls, list) else message


def _decoded_call(call: Any) -> Any:
    """A tool call, ``{"function": {"name": …, "arguments": …}}`` or the function alone."""
    if not isinstance(call, dict):
        return call
    if isinstance(inner := call.get("function"), dict):
        return {**call, "function": _decoded_call(inner)}
    if not isinstance(text := call.get("arguments"), str):
        return call
    try:
        value = json_value(text)
    except ValueError:
        return call
    return {**call, "arguments": value} if isinstance(value, dict) else call
