"""Drop groups whose answers repeat each other: a collapsed policy has nothing to compare.

Source: the diversity of a group's answers as an indicator of entropy collapse is discussed in DAPO (Yu et al. 2025,
arXiv:2503.14476, section 3.1); counting equal texts is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import FilterDecision, SampleGroup


def distinct(args: Any, group: SampleGroup) -> FilterDecision:
    """Keep the group if at least two of its responses differ; else the reason is ``duplicates``.

    White space around a response does not count; a response of several parts is one. Samples without a reward (failed,
    aborted) are not looked at.
    """
    return _decide(group, 2)


def at_least(num_distinct: int) -> Callable[[Any, SampleGroup], FilterDecision]:
    """A filter that wants ``num_distinct`` different responses. Raises ConfigError unless that is at least 1."""
    if num_distinct < 1:
        what = f"num_distinct is {num_distinct!r}"
        raise ConfigError(what, where="filter_hub.duplicates.at_least", expected="at least 1")

    def distinct_enough(args: Any, group: SampleGroup) -> FilterDecision:
        return _decide(group, num_distinct)

    return distinct_enough


def _decide(group: SampleGroup, num_distinct: int) -> FilterDecision:
    texts = [tuple(part.response.strip() for part in parts if part.reward is not None) for parts in group.by_sample()]
    keep = len(set(filter(None, texts))) >= num_distinct
    return FilterDecision(keep=keep, reason="" if keep else "duplicates")
