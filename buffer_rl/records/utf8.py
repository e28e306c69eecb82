"""Text that UTF-8 cannot encode: a ``str`` may hold a lone surrogate, half of a pair of UTF-16.

It comes from a JSON escape such as ``\\ud800``, from ``errors="surrogateescape"``, or from text that was cut between
two halves. Readers of data refuse it (``lone_surrogate``); what is written of a run must never fail because of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any


def lone_surrogate(value: Any) -> str:
    """The first lone surrogate in the texts of ``value``, keys included, as an escape; empty if there is none.

    value: what JSON holds; values of other types are passed over."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"\\u{ord(value[error.start]):04x}"
        return ""
    children: Iterable[Any] = ()
    if isinstance(value, dict):
        children = chain(value, value.values())
    elif isinstance(value, list | tuple):
        children = value
    return next((found for child in children if (found := lone_surrogate(child))), "")


def encodable(value: Any) -> Any:
    """``value`` with the lone surrogates of its texts written as escapes, in copies of its lists and mappings."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return [encodable(item) for item in value] if isinstance(value, list | tuple) else value
