"""REINFORCE leave-one-out: the baseline of a sample is the mean reward of the prompt's other samples."""

from __future__ import annotations

import numpy as np

from buffer_rl.algo.advantages import group_normalize


def leave_one_out(rewards_n: np.ndarray) -> np.ndarray:
    """Each reward minus the mean of the others: ``[num_samples]``, the samples of one prompt, float64.

    Ahmadian et al. (arXiv 2402.14740), the estimator RLOO: ``r_i - sum(r_j for j != i) / (n - 1)``, which is
    ``n / (n - 1)`` times the reward minus the mean of all. A single sample has no others and gets 0.

    Raises RewardError as ``group_normalize``.
    """
    centred_n = group_normalize(rewards_n, std=False)
    num_samples = len(centred_n)
    return centred_n * (num_samples / (num_samples - 1)) if num_samples > 1 else centred_n
