"""Records of filters."""

from __future__ import annotations

from buffer_rl_slime.filters import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from buffer_rl_slime.missing import missing

__getattr__ = missing(__name__)
__all__ = [
    "DynamicFilterOutput",
    "MetricGatherer",
    "call_dynamic_filter",
    "should_drop_dynamic_filter_output",
]
