"""Trace spans."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.traces import build_sglang_meta_trace_attrs, trace_event, trace_function, trace_span

__getattr__ = missing(__name__)
__all__ = [
    "build_sglang_meta_trace_attrs",
    "trace_event",
    "trace_function",
    "trace_span",
]
