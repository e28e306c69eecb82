"""Dynamic sampling filters."""

from __future__ import annotations

from buffer_rl_slime.filters import check_reward_nonzero_std, check_reward_nonzero_std_with_fallback
from buffer_rl_slime.missing import missing

__getattr__ = missing(__name__)
__all__ = [
    "check_reward_nonzero_std",
    "check_reward_nonzero_std_with_fallback",
]
