"""Evaluation sets."""

from __future__ import annotations

from buffer_rl.data.eval_sets import EvalDatasetConfig
from buffer_rl_slime.missing import missing

__getattr__ = missing(__name__)
__all__ = [
    "EvalDatasetConfig",
]
