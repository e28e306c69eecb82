"""The table of algorithms: what a name of ``--advantage-estimator`` selects beside the estimator.

Without torch: options are checked, and rewards normalised, where it is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    """loss: the registered name of the loss that the algorithm is defined with. rewards: their normalisation. options:
    those that the algorithm reads of ``buffer_rl.algo.options.AlgorithmOptions``. critic: it has a value model."""

    loss: str = "policy_loss"
    rewards: Rewards = Rewards.STANDARD
    options: frozenset[str] = frozenset()
    critic: bool = False


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(),
    "dr_grpo": Algorithm(rewards=Rewards.CENTRED),
    "rloo": Algorithm(rewards=Rewards.LEAVE_ONE_OUT),
    "pass_at_k": Algorithm(rewards=Rewards.PASS_AT_K, options=frozenset({"pass_at_k"})),
    "gpg": Algorithm(rewards=Rewards.CENTRED),
    "reinforce_plus_plus": Algorithm(rewards=Rewards.RAW, options=frozenset({"gamma", "kl_coef"})),
    "reinforce_plus_plus_baseline": Algorithm(rewards=Rewards.CENTRED),
    "remax": Algorithm(rewards=Rewards.RAW, options=frozenset({"kl_coef"})),
    "gae": Algorithm(rewards=Rewards.RAW, options=frozenset({"gamma", "lambd", "kl_coef"})),
    "ppo": Algorithm(rewards=Rewards.RAW, options=frozenset({"gamma", "lambd", "kl_coef"}), critic=True),
    "gspo": Algorithm(loss="gspo"),
    "cispo": Algorithm(loss="cispo"),
}
"""By the registered name of the estimator; one of the user's own has the defaults."""

LOSSES = frozenset(
    {"policy_loss", "sft_loss", "gspo", "gspo_token", "cispo", "gmpo", "sapo", "decoupled_ppo", "dpo"},
)
"""The registered names of built-in losses."""


def algorithm_of(estimator: str) -> Algorithm:
    """The algorithm of an estimator's name or path."""
    return ALGORITHMS.get(estimator, Algorithm())
