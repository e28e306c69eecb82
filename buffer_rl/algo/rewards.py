"""From raw rewards of one prompt's samples to those that an estimator sees: shaped, then normalised. Numpy only:
rollout workers normalise rewards without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError, RewardError
from buffer_rl.plan.algorithm import estimator_of
from buffer_rl.plan.algorithms import Rewards, algorithm_of
from buffer_rl.records.groups import equal_rewards


def shaped(args: Args, rewards_n: np.ndarray, lengths_n: np.ndarray) -> np.ndarray:
    """What is normalised in place of raw rewards, ``[num_samples]`` float64: clipped to ``--reward-clip``, times
    ``--reward-scale``, minus the penalties of long responses, which are neither clipped nor scaled."""
    bounds = reward_bounds(args)
    clipped_n = np.clip(rewards_n, *bounds) if bounds else rewards_n
    if not args.overlong_buffer_len and not args.length_penalty and args.reward_scale == 1:
        return clipped_n
    penalties_n = overlong_penalties(args, lengths_n) + length_penalties(args, lengths_n)
    shaped_n: np.ndarray = clipped_n * float(args.reward_scale) + penalties_n
    return shaped_n


def reward_bounds(args: Args) -> tuple[float, float] | None:
    """The lowest and the highest reward; None where they are not clipped. Raises ConfigError for bounds without a
    number between them, and for more than two."""
    if not args.reward_clip:
        return None
    bounds = [-args.reward_clip[0], *args.reward_clip] if len(args.reward_clip) == 1 else args.reward_clip
    if len(bounds) != 2 or bounds[0] >= bounds[1]:
        shown = " and ".join(f"{bound:g}" for bound in bounds)
        expected = "one number above 0, or a lower and a higher one"
        raise ConfigError(f"no reward is between {shown}", where="--reward-clip", expected=expected)
    return bounds[0], bounds[1]


def length_penalties(args: Args, lengths_n: np.ndarray) -> np.ndarray:
    """What is added for lengths, ``[num_samples]`` float64: ``--length-penalty`` times -1 for a response of
    ``--rollout-max-response-len`` tokens, in proportion for others. All response tokens count, masked ones too.

    LCPO-Exact (arXiv 2503.04697) with a target of 0 tokens: ``-alpha |n_target - n|``."""
    penalties_n: np.ndarray = lengths_n * (-float(args.length_penalty) / args.rollout_max_response_len)
    return penalties_n


def overlong_penalties(args: Args, lengths_n: np.ndarray) -> np.ndarray:
    """What is added to rewards of responses of ``lengths_n`` tokens, ``[num_samples]`` float64, 0 or less.

    DAPO (arXiv 2503.14476) equation 13, soft overlong punishment: 0 up to ``L_max - L_cache`` tokens, from there on
    linear to -1 at ``L_max``, and -1 beyond; times ``--overlong-penalty-factor``. ``L_cache`` is
    ``--overlong-buffer-len`` and ``L_max`` ``--rollout-max-response-len``. All response tokens count, masked ones too.
    """
    if not args.overlong_buffer_len:
        return np.zeros(len(lengths_n))
    over_n = lengths_n - (args.rollout_max_response_len - args.overlong_buffer_len)
    share_n: np.ndarray = np.clip(over_n / args.overlong_buffer_len, 0.0, 1.0)
    return share_n * -float(args.overlong_penalty_factor)


def rewards_kind(args: Args) -> Rewards:
    """The normalisation of a run's rewards: its algorithm's, as far as ``--disable-rewards-normalization`` and
    ``--grpo-std-normalization`` leave it."""
    kind = algorithm_of(estimator_of(args)[1]).rewards
    if args.disable_rewards_normalization:
        return Rewards.RAW
    return Rewards.CENTRED if kind is Rewards.STANDARD and not args.grpo_std_normalization else kind


def normalized(kind: Rewards, rewards_n: np.ndarray, k: int) -> np.ndarray:
    """``[num_samples]``, the samples of one prompt, float64. k: of ``Rewards.PASS_AT_K``. Raises RewardError for
    rewards that are not finite, except raw ones."""
    match kind:
        case Rewards.RAW:
            return rewards_n
        case Rewards.LEAVE_ONE_OUT:
            return leave_one_out(rewards_n)
        case Rewards.PASS_AT_K:
            return best_of_k(rewards_n, k)
    return group_normalize(rewards_n, std=kind is Rewards.STANDARD)


ROUNDING = 1e-12
"""Of the largest reward: many times the rounding of a float64 mean of a thousand."""
STD_EPS = 1e-6
"""Added to the standard deviation, as in slime (``slime/ray/rollout.py``)."""


def group_normalize(rewards: Sequence[float] | np.ndarray, std: bool) -> np.ndarray:
    """One prompt's rewards minus their mean, divided by their standard deviation if ``std``.

    rewards: ``[num_samples]``, the samples of **one** prompt; prompts with different numbers of samples are
    normalised one by one. Returns ``[num_samples]`` float64 whose mean is 0.

    With ``std``: DeepSeekMath (arXiv 2402.03300) section 4.1.2, ``(r - mean(r)) / std(r)``. Without: Dr. GRPO
    (arXiv 2503.20783) section 3.2, which drops the division because it weighs a prompt by its difficulty. The
    paper leaves the kind of deviation open; this is the sample standard deviation (divisor ``num_samples - 1``),
    which slime and TRL take from ``torch.std``. Rewards that are equal (``buffer_rl.records.groups.equal_rewards``),
    a single one, and one that is the mean give exactly 0.

    Raises RewardError if the rewards are empty, not one-dimensional or not finite.
    """
    rewards_n = np.asarray(rewards, dtype=np.float64)
    if rewards_n.ndim != 1 or rewards_n.size == 0:
        what = f"rewards of shape {rewards_n.shape} cannot be normalised"
        raise RewardError(what, expected="one number for each sample")
    if not np.isfinite(rewards_n).all():
        raise RewardError(f"rewards are not finite: {rewards_n.tolist()}", expected="finite numbers")
    if equal_rewards(rewards_n):
        return np.zeros(rewards_n.size)
    shifted_n = rewards_n - rewards_n[0]
    centred_n: np.ndarray = _without_rounding(shifted_n - shifted_n.mean(), rewards_n)
    if not std:
        return centred_n
    return centred_n / (float(centred_n.std(ddof=1)) + STD_EPS)


def _without_rounding(centred_n: np.ndarray, rewards_n: np.ndarray) -> np.ndarray:
    """0 for what is no more than the rounding of a sum of rewards: its sign would say which side a ratio is clipped on,
    and count as clipped."""
    return np.where(np.abs(centred_n) <= ROUNDING * np.abs(rewards_n).max(), 0.0, centred_n)


def leave_one_out(rewards_n: np.ndarray) -> np.ndarray:
    """Each reward minus the mean of the others: ``[num_samples]``, the samples of one prompt, float64.

    Ahmadian et al. (arXiv 2402.14740), the estimator RLOO: ``r_i - sum(r_j for j != i) / (n - 1)``, which is
    ``n / (n - 1)`` times the reward minus the mean of all. A single sample has no others and gets 0.

    Raises RewardError as ``group_normalize``.
    """
    centred_n = group_normalize(rewards_n, std=False)
    num_samples = len(centred_n)
    return centred_n * (num_samples / (num_samples - 1)) if num_samples > 1 else centred_n


def best_of_k(rewards_n: np.ndarray, k: int) -> np.ndarray:
    """Advantages of one prompt's samples for the best reward among ``k`` of them: ``[num_samples]``, float64, mean 0.

    Chen et al. (arXiv 2508.10751) section 2.4, equations 11 to 15: a group is each subset of ``k`` of the ``n`` samples
    and its reward the largest in it. A sample's advantage is the mean reward of the subsets that contain it, minus the
    mean of all subsets, divided by their (population) standard deviation. For rewards 0 and 1, with ``N`` wrong
    samples, the mean is ``1 - C(N, k) / C(n, k)``, that of subsets with a given correct sample 1, and with a given
    wrong one ``1 - C(N - 1, k - 1) / C(n - 1, k - 1)``, as in the paper; here rewards may be any numbers. ``k = 1`` is
    GRPO with the population deviation. Where all subsets are equal, so for ``k >= n``, every advantage is 0.

    Raises RewardError as ``group_normalize``.
    """
    shifted_n = group_normalize(rewards_n, std=False)
    num_samples = len(shifted_n)
    if k >= num_samples:
        return np.zeros(num_samples)
    order_n = np.argsort(shifted_n, kind="stable")
    sorted_n = shifted_n[order_n]
    if equal_rewards(sorted_n[k - 1 :]):  # each of them is the best of some subset
        return np.zeros(num_samples)
    # Of the subsets, the shares whose largest element is the j-th smallest; then of those with one given sample below.
    best_n = np.array([comb(j, k - 1) / comb(num_samples, k) for j in range(num_samples)])
    itself_n = np.array([comb(j, k - 1) / comb(num_samples - 1, k - 1) for j in range(num_samples)])
    above_n = np.array(
        [comb(j - 1, k - 2) / comb(num_samples - 1, k - 1) if j and k > 1 else 0.0 for j in range(num_samples)]
    )
    mean = float(best_n @ sorted_n)
    variance = float(best_n @ (sorted_n - mean) ** 2)
    better_n = above_n * sorted_n
    with_n = itself_n * sorted_n + (better_n.sum() - np.cumsum(better_n))
    advantages_n = np.empty(num_samples)
    advantages_n[order_n] = _without_rounding(with_n - mean, rewards_n) / np.sqrt(variance)
    return advantages_n
