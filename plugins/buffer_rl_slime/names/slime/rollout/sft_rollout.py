"""Supervised fine-tuning."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.sft import generate_rollout

__getattr__ = missing(__name__)
__all__ = [
    "generate_rollout",
]
