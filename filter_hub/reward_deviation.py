"""Keep groups whose rewards differ: only they carry a gradient under group-relative advantages.

Source: dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2), stated on the standard deviation of
the rewards, so that it holds for rewards other than 0 and 1 as well.
"""

from __future__ import annotations

from typing import Any

from buffer_rl.types import FilterDecision, SampleGroup


def nonzero(args: Any, group: SampleGroup) -> FilterDecision:
    """Keep the group if the standard deviation of its rewards is not 0; else the reason is ``zero_std_{reward}``.

    Equality is tested on the rewards themselves: a computed deviation of equal floats may come out as 1e-17.
    Samples without a reward (failed, aborted) do not count; a group without any is dropped as ``no_rewards``.
    """
    rewards = [sample.get_reward_value(args) for sample in group if sample.reward is not None]
    if not rewards:
        return FilterDecision(keep=False, reason="no_rewards")
    if min(rewards) == max(rewards):
        return FilterDecision(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")
    return FilterDecision(keep=True)
