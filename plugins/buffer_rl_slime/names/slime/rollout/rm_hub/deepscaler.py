"""The reward deepscaler."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.rewards import get_deepscaler_rule_based_reward

__getattr__ = missing(__name__)
__all__ = [
    "get_deepscaler_rule_based_reward",
]
