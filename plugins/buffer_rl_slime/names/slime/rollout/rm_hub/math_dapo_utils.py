"""The reward dapo."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.rewards import compute_score

__getattr__ = missing(__name__)
__all__ = [
    "compute_score",
]
