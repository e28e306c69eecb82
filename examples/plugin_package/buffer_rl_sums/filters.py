"""A filter that drops prompts that no response came near to."""

from __future__ import annotations

from typing import Any

from buffer_rl.records.groups import FilterDecision, SampleGroup


def some_answered(args: Any, group: SampleGroup) -> FilterDecision:
    """Keep the group if any of its rewards is above 0."""
    keep = any(sample.get_reward_value(args) > 0 for sample in group)
    return FilterDecision(keep=keep, reason="" if keep else "none_near")
