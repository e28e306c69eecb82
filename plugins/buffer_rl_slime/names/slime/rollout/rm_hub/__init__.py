"""Rewards."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.rewards import (
    async_rm,
    batched_async_rm,
    compute_gpqa_reward,
    f1_score,
    get_deepscaler_rule_based_reward,
    grade_answer_verl,
    remote_rm,
)

__getattr__ = missing(__name__)
__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "remote_rm",
]
