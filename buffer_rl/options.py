"""The sections that make up ``args``, by reference, in the order in which ``--help`` shows them."""

from __future__ import annotations

CORE_SECTIONS: tuple[str, ...] = (
    "buffer_rl.driver.options:RunOptions",
    "buffer_rl.data.options:DataOptions",
    "buffer_rl.rollout.options:RolloutOptions",
    "buffer_rl.rollout.options:RewardOptions",
    "buffer_rl.rollout.options:EvalOptions",
    "buffer_rl.buffer.options:BufferOptions",
    "buffer_rl.engine.options:EngineOptions",
    "buffer_rl.train.options:TrainOptions",
    "buffer_rl.train.options:OptimizerOptions",
    "buffer_rl.train.options:LossOptions",
    "buffer_rl.weights.options:WeightOptions",
    "buffer_rl.observe.options:ObserveOptions",
)
