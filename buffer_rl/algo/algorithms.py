"""The table of algorithms: what a name of ``--advantage-estimator`` selects beside the estimator.

Without torch: options are checked, and rewards normalised, where it is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Rewards(StrEnum):
    """What is done to the rewards of a prompt's samples before the estimator sees them: as they are, minus their mean,
    or divided by their standard deviation too."""

    RAW = "raw"
    CENTRED = "centred"
    STANDARD = "standard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """loss: the registered name of the loss that the algorithm is defined with. rewards: their normalisation."""

    loss: str = "policy_loss"
    rewards: Rewards = Rewards.STANDARD


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(),
    "gspo": Algorithm(loss="gspo"),
    "cispo": Algorithm(loss="cispo"),
}
"""By the registered name of the estimator; one of the user's own has the defaults."""


def algorithm_of(estimator: str) -> Algorithm:
    """The algorithm of an estimator's name or path."""
    return ALGORITHMS.get(estimator, Algorithm())
