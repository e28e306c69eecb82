"""The reward gpqa."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.rewards import compute_gpqa_reward

__getattr__ = missing(__name__)
__all__ = [
    "compute_gpqa_reward",
]
