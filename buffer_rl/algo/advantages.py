"""Advantage estimators: functions that set the columns ``advantages`` and ``returns`` of a batch; normalised rewards.
Numpy only: rollout workers normalise rewards without torch.

Each column holds one array ``[response_length]`` float32 for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from buffer_rl.errors import DataError, RewardError
from buffer_rl.scope import scoped
from buffer_rl.types import TrainBatch


@scoped("row")
def grpo(args: Any, batch: TrainBatch) -> None:
    """Group-relative advantages: each response token gets its sample's normalised reward.

    DeepSeekMath (arXiv 2402.03300) section 4.1.2, outcome supervision. The normalisation over the samples of a
    prompt was done when the rewards were post-processed (``group_normalize``), because a rank
    may see only some of a prompt's samples. Returns equal advantages: there is no value function.

    So ``dr_grpo``, ``rloo`` and ``pass_at_k`` are this function too: their rewards are normalised in another way
    (``buffer_rl.algo.algorithms``).

    Raises DataError if the batch has no ``reward`` column or a reward is not finite.
    """
    lengths = np.asarray(batch.columns["response_length"]).tolist()
    pairs = list(zip(rewards_of(batch), lengths, strict=True))
    batch.columns["advantages"] = [np.full(length, reward, dtype=np.float32) for reward, length in pairs]
    batch.columns["returns"] = [np.full(length, reward, dtype=np.float32) for reward, length in pairs]


def rewards_of(batch: TrainBatch, column: str = "reward") -> np.ndarray:
    """One reward for each row, ``[num_rows]`` float32. Raises DataError if the column is not there or not finite."""
    if column not in batch.columns:
        raise DataError(
            f"the batch has no {column}s",
            where=batch.task,
            expected=f"a column {column}",
            hint="score the samples first",
        )
    rewards = np.asarray(batch.columns[column], dtype=np.float32)
    if not np.isfinite(rewards).all():
        row = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise DataError(f"the {column} is {rewards[row]}", where=str(batch.row_ids[row]), expected="a finite number")
    return rewards


STD_EPS = 1e-6
"""Added to the standard deviation, as in slime (``slime/ray/rollout.py``)."""


def group_normalize(rewards: Sequence[float] | np.ndarray, std: bool) -> np.ndarray:
    """One prompt's rewards minus their mean, divided by their standard deviation if ``std``.

    rewards: ``[num_samples]``, the samples of **one** prompt; prompts with different numbers of samples are
    normalised one by one. Returns ``[num_samples]`` float64 whose mean is 0.

    With ``std``: DeepSeekMath (arXiv 2402.03300) section 4.1.2, ``(r - mean(r)) / std(r)``. Without: Dr. GRPO
    (arXiv 2503.20783) section 3.1, which drops the division because it weighs a prompt by its difficulty. The
    paper leaves the kind of deviation open; this is the sample standard deviation (divisor ``num_samples - 1``),
    which slime and TRL take from ``torch.std``. Equal rewards, and a single one, give exactly 0.

    Raises RewardError if the rewards are empty, not one-dimensional or not finite.
    """
    rewards_n = np.asarray(rewards, dtype=np.float64)
    if rewards_n.ndim != 1 or rewards_n.size == 0:
        raise RewardError(
            f"rewards of shape {rewards_n.shape} cannot be normalised", expected="one number for each sample"
        )
    if not np.isfinite(rewards_n).all():
        raise RewardError(f"rewards are not finite: {rewards_n.tolist()}", expected="finite numbers")
    # Subtracting the first reward beforehand makes equal rewards exactly 0: the mean of three times 0.1 is not 0.1.
    shifted_n = rewards_n - rewards_n[0]
    centred_n: np.ndarray = shifted_n - shifted_n.mean()
    if not std or rewards_n.size == 1:
        return centred_n
    deviation = float(centred_n.std(ddof=1))
    return centred_n / (deviation + STD_EPS)
