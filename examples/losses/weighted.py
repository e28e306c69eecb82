"""Harder prompts weigh more: a loss that reads a column of its own, and the converter of samples that gives it.

    buffer-rl train --config examples/quickstart/train.yaml \
        --custom-convert-samples-to-train-data-path examples/losses/weighted.py:with_difficulty \
        --custom-loss-function-path examples/losses/weighted.py:weighted
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from buffer_rl.algo.losses import policy_loss
from buffer_rl.kinds.marks import loss_unit
from buffer_rl.kinds.token_loss import LossInputs, TokenLoss
from buffer_rl.records.groups import Column, Sample, SampleGroup, sample_means
from buffer_rl.rollout.conversion import GroupConverter


def with_difficulty(args: Any, samples: list[Sample]) -> dict[str, Column]:
    """The built-in columns of one prompt's samples, and ``difficulty`` ``[num_rows]``: 1 minus the mean reward of the
    prompt's samples, for rewards from 0 to 1."""
    uid = samples[0].uid
    assert uid is not None
    _, columns = GroupConverter(args).encode(SampleGroup(uid=uid, samples=samples), evaluation=False)
    mean = np.mean(sample_means([sample.sample_index for sample in samples], columns["raw_reward"]))
    return columns | {"difficulty": np.full(len(samples), 1 - mean, dtype=np.float32)}


@loss_unit("token", needs=("difficulty",))
def weighted(args: Any, inputs: LossInputs) -> TokenLoss:
    """The clipped surrogate of PPO, as a mean over tokens that are weighed by the difficulty of their prompt."""
    loss = policy_loss(args, inputs)
    difficulty = inputs["difficulty"]
    return replace(
        loss,
        weights=inputs.loss_mask * difficulty[:, None],
        metrics={**loss.metrics, "difficulty": difficulty},
    )
