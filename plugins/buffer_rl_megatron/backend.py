"""What ``--train-backend megatron`` names: the driver looks at it without importing Megatron, which takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from buffer_rl.kinds.objective import Objective
    from buffer_rl_megatron.options import MegatronArgs
    from buffer_rl_megatron.trainer import MegatronTrainer


def build(args: MegatronArgs, rank: int, world_size: int, objective: Objective) -> MegatronTrainer:
    """One rank; see ``MegatronTrainer`` for what it raises."""
    from buffer_rl_megatron.trainer import MegatronTrainer

    return MegatronTrainer(args, rank, world_size, objective)


build.reads_old_log_probs = False  # type: ignore[attr-defined]
