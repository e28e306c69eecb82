"""Loss masks of conversations."""

from __future__ import annotations

from buffer_rl_slime.masks import MultiTurnLossMaskGenerator, get_response_lengths
from buffer_rl_slime.missing import missing

__getattr__ = missing(__name__)
__all__ = [
    "MultiTurnLossMaskGenerator",
    "get_response_lengths",
]
