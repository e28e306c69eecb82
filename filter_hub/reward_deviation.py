"""Keep groups whose rewards differ: only they carry a gradient under group-relative advantages.

Source: dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2), stated on the standard deviation of
the rewards, so that it holds for rewards other than 0 and 1 as well.
"""

from __future__ import annotations

from statistics import stdev
from typing import Any

from buffer_rl.types import FilterDecision, SampleGroup

MIN_STD = 1e-6
"""Rewards that deviate by no more count as equal: a reward of float sums may differ by rounding alone."""


def nonzero(args: Any, group: SampleGroup) -> FilterDecision:
    """Keep the group if the standard deviation of its rewards (divisor n - 1) is above ``MIN_STD``; else the reason is
    ``zero_std_{reward}``.

    Samples without a reward (failed, aborted) do not count, and one of several parts has the mean of theirs; a group
    without any is dropped as ``no_rewards``.
    """
    rewards = group.rewards(args)
    if not rewards:
        return FilterDecision(keep=False, reason="no_rewards")
    if len(rewards) < 2 or stdev(rewards) <= MIN_STD:
        return FilterDecision(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")
    return FilterDecision(keep=True)
