"""The sections that make up ``args``, by reference, in the order in which ``--help`` shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buffer_rl.agents.options import AgentOptions
    from buffer_rl.algo.options import AlgorithmOptions, LossOptions
    from buffer_rl.cluster.options import BufferOptions, EngineOptions, PlacementOptions
    from buffer_rl.data.options import DataOptions
    from buffer_rl.driver.options import DebugOptions, ObserveOptions, RunOptions
    from buffer_rl.options.section import Options
    from buffer_rl.rollout.options import EvalOptions, RewardOptions, RolloutOptions
    from buffer_rl.trainer.options import CriticOptions, LoraOptions, OptimizerOptions, TrainOptions
    from buffer_rl.weights.options import WeightOptions

    class Args(
        RunOptions,
        DataOptions,
        RolloutOptions,
        RewardOptions,
        AgentOptions,
        EvalOptions,
        BufferOptions,
        EngineOptions,
        PlacementOptions,
        TrainOptions,
        OptimizerOptions,
        LoraOptions,
        CriticOptions,
        LossOptions,
        AlgorithmOptions,
        WeightOptions,
        ObserveOptions,
        DebugOptions,
        Options,
    ):
        """What ``args`` is for a type checker. The class itself is composed at run time, plugins' sections included."""
else:
    Args = Any  # for annotations alone, so that every module may name it and this one imports none


CORE_SECTIONS: tuple[str, ...] = (
    "buffer_rl.driver.options:RunOptions",
    "buffer_rl.data.options:DataOptions",
    "buffer_rl.rollout.options:RolloutOptions",
    "buffer_rl.rollout.options:RewardOptions",
    "buffer_rl.agents.options:AgentOptions",
    "buffer_rl.rollout.options:EvalOptions",
    "buffer_rl.cluster.options:BufferOptions",
    "buffer_rl.cluster.options:EngineOptions",
    "buffer_rl.cluster.options:PlacementOptions",
    "buffer_rl.trainer.options:TrainOptions",
    "buffer_rl.trainer.options:OptimizerOptions",
    "buffer_rl.trainer.options:LoraOptions",
    "buffer_rl.trainer.options:CriticOptions",
    "buffer_rl.algo.options:LossOptions",
    "buffer_rl.algo.options:AlgorithmOptions",
    "buffer_rl.weights.options:WeightOptions",
    "buffer_rl.driver.options:ObserveOptions",
    "buffer_rl.driver.options:DebugOptions",
)
