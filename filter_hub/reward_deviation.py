"""Keep groups whose rewards differ: only they carry a gradient under group-relative advantages.

Source: dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2), stated on the standard deviation of
the rewards, so that it holds for rewards other than 0 and 1 as well.
"""

from __future__ import annotations

from typing import Any

from buffer_rl.records.groups import FilterDecision, SampleGroup, equal_rewards


def nonzero(args: Any, group: SampleGroup) -> FilterDecision:
    """Keep the group if its rewards differ by more than rounding (``buffer_rl.records.groups.equal_rewards``); else the
    reason is ``zero_std``.

    Samples without a reward (failed, aborted) do not count, and one of several parts has the mean of theirs; a group
    without any is dropped as ``no_rewards``.
    """
    rewards = group.rewards(args)
    if not rewards:
        return FilterDecision(keep=False, reason="no_rewards")
    if equal_rewards(rewards):
        return FilterDecision(keep=False, reason="zero_std")
    return FilterDecision(keep=True)
