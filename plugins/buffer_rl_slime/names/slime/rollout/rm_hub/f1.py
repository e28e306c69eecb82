"""The reward f1."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.rewards import f1_score

__getattr__ = missing(__name__)
__all__ = [
    "f1_score",
]
