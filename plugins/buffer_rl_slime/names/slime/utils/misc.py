"""Small helpers."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.tools import (
    Box,
    SingletonMeta,
    decode_int32_meta_array,
    group_by,
    load_function,
    should_run_periodic_action,
)

__getattr__ = missing(__name__)
__all__ = [
    "Box",
    "SingletonMeta",
    "decode_int32_meta_array",
    "group_by",
    "load_function",
    "should_run_periodic_action",
]
