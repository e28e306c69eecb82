"""The tables of algorithms and losses: what a name of ``--advantage-estimator`` or ``--loss-type`` selects.

Without torch: options are checked, and rewards normalised, where it is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class Rewards(StrEnum):
    """What is done to the rewards of a prompt's samples before the estimator sees them: as they are; minus their mean;
    divided by their standard deviation too; minus the mean of the other samples; share in the best of k samples."""

    RAW = "raw"
    CENTRED = "centred"
    STANDARD = "standard"
    LEAVE_ONE_OUT = "leave_one_out"
    PASS_AT_K = "pass_at_k"


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """estimator: the function that computes advantages. loss: the name of the loss that the algorithm is defined with.
    rewards: their normalisation. options: those that it reads of ``buffer_rl.algo.options.AlgorithmOptions``.
    critic: it has a value model."""

    estimator: str = "buffer_rl.algo.advantages:grpo"
    loss: str = "policy_loss"
    rewards: Rewards = Rewards.STANDARD
    options: frozenset[str] = frozenset()
    critic: bool = False


class Divisor(StrEnum):
    """What a step's loss is divided by: tokens or samples, as ``--loss-agg-mode`` says; samples, for a loss that is a
    number for each row; the sum of the loss's own weights."""

    BY_MODE = "by_mode"
    SAMPLES = "samples"
    OWN_WEIGHTS = "own_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """function: the loss. uncorrected: why ``--use-tis`` has no meaning for it, and tokens of older weights are no
    error; empty for a loss with a ratio to the old policy. divisor: of a step."""

    function: str
    uncorrected: str = ""
    divisor: Divisor = Divisor.BY_MODE


_GAE = Algorithm(
    estimator="buffer_rl.algo.gae:gae",
    rewards=Rewards.RAW,
    options=frozenset({"gamma", "lambd", "kl_coef", "turn_rewards"}),
)
ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(),
    "dr_grpo": Algorithm(rewards=Rewards.CENTRED),
    "rloo": Algorithm(rewards=Rewards.LEAVE_ONE_OUT),
    "pass_at_k": Algorithm(rewards=Rewards.PASS_AT_K, options=frozenset({"pass_at_k"})),
    "gpg": Algorithm(estimator="buffer_rl.algo.reinforce:gpg", rewards=Rewards.CENTRED),
    "reinforce_plus_plus": Algorithm(
        estimator="buffer_rl.algo.reinforce:reinforce_plus_plus",
        rewards=Rewards.RAW,
        options=frozenset({"gamma", "kl_coef", "turn_rewards"}),
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        estimator="buffer_rl.algo.reinforce:reinforce_plus_plus_baseline", rewards=Rewards.CENTRED
    ),
    "remax": Algorithm(estimator="buffer_rl.algo.reinforce:remax", rewards=Rewards.RAW, options=frozenset({"kl_coef"})),
    "gae": _GAE,
    "ppo": replace(_GAE, critic=True),
    "gspo": Algorithm(loss="gspo"),
    "cispo": Algorithm(loss="cispo"),
}
"""By the name of the estimator; one of the user's own has the defaults."""

LOSSES: Mapping[str, Loss] = {
    "policy_loss": Loss(function="buffer_rl.algo.losses:policy_loss"),
    "sft_loss": Loss(function="buffer_rl.algo.losses:sft_loss", uncorrected="has no ratios"),
    "gspo": Loss(function="buffer_rl.algo.losses:gspo", divisor=Divisor.SAMPLES),
    "gspo_token": Loss(function="buffer_rl.algo.losses:gspo_token"),
    "cispo": Loss(function="buffer_rl.algo.losses:cispo"),
    "decoupled_ppo": Loss(
        function="buffer_rl.algo.losses:decoupled_ppo",
        uncorrected="has the weights from the engine to the trainer in itself",
    ),
    "gmpo": Loss(function="buffer_rl.algo.losses:gmpo", divisor=Divisor.SAMPLES),
    "sapo": Loss(function="buffer_rl.algo.losses:sapo"),
    "dpo": Loss(
        function="buffer_rl.algo.dpo:dpo",
        uncorrected="compares responses with the reference, not with the policy that sampled them",
        divisor=Divisor.OWN_WEIGHTS,
    ),
}

REFERENCES: Mapping[str, Mapping[str, str]] = {
    "advantage": {name: algorithm.estimator for name, algorithm in ALGORITHMS.items()},
    "loss": {name: loss.function for name, loss in LOSSES.items()},
}
"""By plugin kind, the names that are registered without an entry point of their own each."""


def algorithm_of(estimator: str) -> Algorithm:
    """The algorithm of an estimator's name or path."""
    return ALGORITHMS.get(estimator) or Algorithm()
