"""Supervised fine-tuning as a synchronous rollout function (``slime.rollout.sft_rollout``)."""

from __future__ import annotations

from typing import Any

from buffer_rl.rollout.sft import SFTRollout
from buffer_rl_slime.running import run


def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """The built-in function ``sft``, which reports its groups itself."""
    return run(SFTRollout(args)(args, rollout_id, data_buffer, evaluation))
