"""Data sets."""

from __future__ import annotations

from buffer_rl_slime.data_source import Dataset
from buffer_rl_slime.missing import missing

__getattr__ = missing(__name__)
__all__ = [
    "Dataset",
]
