"""Hooks of samples."""

from __future__ import annotations

from buffer_rl_slime.hooks import apply_rollout_sample_hooks
from buffer_rl_slime.missing import missing

__getattr__ = missing(__name__)
__all__ = [
    "apply_rollout_sample_hooks",
]
