"""Keep groups whose rewards differ: only they carry a gradient under group-relative advantages.

Source: dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2), stated on the standard deviation of
the rewards, so that it holds for rewards other than 0 and 1 as well.
"""

from __future__ import annotations

from typing import Any

from buffer_rl.types import FilterDecision, SampleGroup, equal_rewards, sample_means


def nonzero(args: Any, group: SampleGroup) -> FilterDecision:
    """Keep the group if its rewards differ by more than rounding (``buffer_rl.types.equal_rewards``); else the reason
    is ``zero_std``.

    Samples without a reward (failed, aborted) do not count; a group without any is dropped as ``no_rewards``.
    """
    rewards = sample_rewards(args, group)
    if not rewards:
        return FilterDecision(keep=False, reason="no_rewards")
    if equal_rewards(rewards):
        return FilterDecision(keep=False, reason="zero_std")
    return FilterDecision(keep=True)


def sample_rewards(args: Any, group: SampleGroup) -> list[float]:
    """The rewards of the samples that have one, ``[num_scored]``; of a sample in several parts, the mean of theirs."""
    scored = [sample for sample in group if sample.reward is not None]
    fanned_out = any(sample.part for sample in scored)
    numbers = [sample.sample_index if fanned_out else place for place, sample in enumerate(scored)]
    return sample_means(numbers, [sample.get_reward_value(args) for sample in scored])
