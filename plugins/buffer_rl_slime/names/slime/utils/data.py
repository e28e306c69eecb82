"""Data sets."""

from __future__ import annotations

from buffer_rl_slime.absent import Dataset
from buffer_rl_slime.missing import missing

__getattr__ = missing(__name__)
__all__ = [
    "Dataset",
]
