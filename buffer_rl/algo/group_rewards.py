"""Group-relative reward normalisation (numpy only, so that rollout workers need no torch).

Suffix legend: ``_n`` is ``[num_samples]``, one number for each sample of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from buffer_rl.errors import RewardError

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
