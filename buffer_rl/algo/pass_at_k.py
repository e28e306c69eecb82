"""Pass@k training: a sample's advantage is its share in the best reward of ``k`` samples."""

from __future__ import annotations

from math import comb

import numpy as np

from buffer_rl.algo.advantages import group_normalize


def best_of_k(rewards_n: np.ndarray, k: int) -> np.ndarray:
    """Advantages of one prompt's samples for the best reward among ``k`` of them: ``[num_samples]``, float64, mean 0.

    Chen et al. (arXiv 2508.10751), "analytical derivation": a group is each subset of ``k`` of the ``n`` samples and
    its reward the largest in it. A sample's advantage is the mean reward of the subsets that contain it, minus the mean
    of all subsets, divided by their (population) standard deviation. For rewards 0 and 1, with ``N`` wrong samples, the
    mean is ``1 - C(N, k) / C(n, k)``, that of subsets with a given correct sample 1, and with a given wrong one
    ``1 - C(N - 1, k - 1) / C(n - 1, k - 1)``, as in the paper; here rewards may be any numbers. ``k = 1`` is GRPO with
    the population deviation. Where all subsets are equal, so for ``k >= n``, every advantage is 0.

    Raises RewardError as ``group_normalize``.
    """
    shifted_n = group_normalize(rewards_n, std=False)
    num_samples = len(shifted_n)
    if k >= num_samples:
        return np.zeros(num_samples)
    order_n = np.argsort(shifted_n, kind="stable")
    sorted_n = shifted_n[order_n]
    # Of the subsets, the shares whose largest element is the j-th smallest; then of those with one given sample below.
    best_n = np.array([comb(j, k - 1) / comb(num_samples, k) for j in range(num_samples)])
    itself_n = np.array([comb(j, k - 1) / comb(num_samples - 1, k - 1) for j in range(num_samples)])
    above_n = np.array(
        [comb(j - 1, k - 2) / comb(num_samples - 1, k - 1) if j and k > 1 else 0.0 for j in range(num_samples)]
    )
    mean = float(best_n @ sorted_n)
    variance = float(best_n @ (sorted_n - mean) ** 2)
    if sorted_n[k - 1] == sorted_n[-1] or variance <= 0:  # the smallest and the largest best
        return np.zeros(num_samples)
    better_n = above_n * sorted_n
    with_n = itself_n * sorted_n + (better_n.sum() - np.cumsum(better_n))
    advantages_n = np.empty(num_samples)
    advantages_n[order_n] = (with_n - mean) / np.sqrt(variance)
    return advantages_n
