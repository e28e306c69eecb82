"""Generation and whole rollouts."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.rollout import (
    GenerateState,
    abort,
    eval_rollout,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    generate_rollout_async,
    get_model_url,
)

__getattr__ = missing(
    __name__,
    {
        "eval_rollout_single_dataset": "call generate_rollout(..., evaluation=True)",
    },
)
__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]
