"""Keep groups of medium difficulty: their mean reward lies within a window.

Source: Bae et al. 2025, Online difficulty filtering for reasoning oriented reinforcement learning,
arXiv:2504.03380: what can be learned from a prompt is bounded by the variance of its success, which is largest at a
pass rate of one half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import FilterDecision, SampleGroup, equal_rewards

LOW, HIGH = 0.2, 0.8
"""The window of ``window``; for rewards from 0 to 1."""


def window(args: Any, group: SampleGroup) -> FilterDecision:
    """Keep the group if the mean of its rewards is from 0.2 to 0.8; else ``too_hard`` or ``too_easy``.

    Samples without a reward (failed, aborted) do not count, and one of several parts counts once; a group without any
    is dropped as ``no_rewards``.
    """
    return _decide(args, group, LOW, HIGH)


def between(low: float, high: float) -> Callable[[Any, SampleGroup], FilterDecision]:
    """The same with limits of one's own, both included. Raises ConfigError unless they are ordered numbers."""
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        what = f"the window is {low!r} to {high!r}"
        raise ConfigError(what, where="filter_hub.difficulty.between", expected="numbers, low <= high")

    def within(args: Any, group: SampleGroup) -> FilterDecision:
        return _decide(args, group, low, high)

    return within


def _decide(args: Any, group: SampleGroup, low: float, high: float) -> FilterDecision:
    rewards = group.rewards(args)
    if not rewards:
        return FilterDecision(keep=False, reason="no_rewards")
    mean = math.fsum(rewards) / len(rewards)
    is_limit = equal_rewards((mean, low)) or equal_rewards((mean, high))  # three times 0.8: 0.8000000000000002
    reason = "" if is_limit or low < mean < high else "too_hard" if mean < low else "too_easy"
    return FilterDecision(keep=not reason, reason=reason)
