"""Trace spans that record nothing: buffer_rl has a timeline of its own (``--timeline``, ``buffer-rl report``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Span:
    """Takes attributes and keeps none."""

    def set_attr(self, key: str, value: Any) -> Span:
        return self

    def update_attrs(self, attrs: Mapping[str, Any] | None) -> Span:
        return self

    set = set_attr
    update = update_attrs


@contextmanager
def trace_span(target: Any, name: str, attrs: Mapping[str, Any] | None = None, **kwargs: Any) -> Iterator[Span]:
    """A span around a block."""
    yield Span()


def trace_event(target: Any, name: str, attrs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
    """A moment."""


def trace_function(name: str, **kwargs: Any) -> Callable[[Any], Any]:
    """A decorator that leaves the function as it is."""
    return lambda function: function


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """No attributes."""
    return {}
