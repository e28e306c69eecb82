"""What rollout functions return."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.rollout import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn

__getattr__ = missing(__name__)
__all__ = [
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "call_rollout_fn",
]
