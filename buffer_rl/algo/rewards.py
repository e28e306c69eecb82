"""From raw rewards of one prompt's samples to those that an estimator sees: shaped, then normalised."""

from __future__ import annotations

from typing import Any

import numpy as np

from buffer_rl.algo.advantages import group_normalize
from buffer_rl.algo.algorithms import Rewards, algorithm_of
from buffer_rl.algo.pass_at_k import best_of_k
from buffer_rl.algo.rloo import leave_one_out
from buffer_rl.errors import ConfigError
from buffer_rl.train.roles import estimator_of


def shaped(args: Any, rewards_n: np.ndarray, lengths_n: np.ndarray) -> np.ndarray:
    """What is normalised in place of raw rewards, ``[num_samples]`` float64: clipped to ``--reward-clip``, times
    ``--reward-scale``, minus the penalties of long responses, which are neither clipped nor scaled."""
    bounds = reward_bounds(args)
    clipped_n = np.clip(rewards_n, *bounds) if bounds else rewards_n
    penalties_n = overlong_penalties(args, lengths_n) + length_penalties(args, lengths_n)
    shaped_n: np.ndarray = clipped_n * float(args.reward_scale) + penalties_n
    return shaped_n


def reward_bounds(args: Any) -> tuple[float, float] | None:
    """The lowest and the highest reward; None where they are not clipped. Raises ConfigError for bounds without a
    number between them."""
    if not args.reward_clip:
        return None
    low, high = args.reward_clip if len(args.reward_clip) == 2 else (-args.reward_clip[0], args.reward_clip[0])
    if low >= high:
        expected = "one number above 0, or a lower and a higher one"
        raise ConfigError(f"no reward is between {low:g} and {high:g}", where="--reward-clip", expected=expected)
    return low, high


def length_penalties(args: Any, lengths_n: np.ndarray) -> np.ndarray:
    """What is added for lengths, ``[num_samples]`` float64: ``--length-penalty`` times -1 for a response of
    ``--rollout-max-response-len`` tokens, in proportion for others. All response tokens count, masked ones too.

    LCPO-Exact (arXiv 2503.04697) with a target of 0 tokens: ``-alpha |n_target - n|``."""
    penalties_n: np.ndarray = lengths_n * (-float(args.length_penalty) / args.rollout_max_response_len)
    return penalties_n


def overlong_penalties(args: Any, lengths_n: np.ndarray) -> np.ndarray:
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


def rewards_kind(args: Any) -> Rewards:
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
