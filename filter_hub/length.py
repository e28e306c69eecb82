"""Drop groups whose responses ran into the length limit.

Source: overlong filtering of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.4): the reward of a truncated
response says little about its reasoning. The paper masks such samples; here that is ``mask_truncated``, a sample
filter, and the others decide about whole groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import FilterDecision, SampleGroup, Status


def some_finished(args: Any, group: SampleGroup) -> FilterDecision:
    """Keep the group unless every one of its responses was truncated (reason ``all_truncated``)."""
    keep = any(sample.status is not Status.TRUNCATED for sample in group)
    return FilterDecision(keep=keep, reason="" if keep else "all_truncated")


def all_finished(args: Any, group: SampleGroup) -> FilterDecision:
    """Keep the group if none of its responses was truncated (else ``truncated``)."""
    keep = all(sample.status is not Status.TRUNCATED for sample in group)
    return FilterDecision(keep=keep, reason="" if keep else "truncated")


def at_most(num_tokens: int) -> Callable[[Any, SampleGroup], FilterDecision]:
    """A filter that keeps groups whose mean response length is at most ``num_tokens`` (else ``overlong``). A sample of
    several parts counts once, with the mean of their lengths.

    Raises ConfigError unless ``num_tokens`` is at least 1.
    """
    if num_tokens < 1:
        raise ConfigError(f"num_tokens is {num_tokens!r}", where="filter_hub.length.at_most", expected="at least 1")

    def short_enough(args: Any, group: SampleGroup) -> FilterDecision:
        lengths = [sum(part.response_length for part in parts) / len(parts) for parts in group.by_sample()]
        keep = sum(lengths) <= num_tokens * len(lengths)
        return FilterDecision(keep=keep, reason="" if keep else "overlong")

    return short_enough


def mask_truncated(args: Any, groups: list[SampleGroup]) -> None:
    """A sample filter: truncated samples stay in their group, but nothing is learned from their tokens."""
    for group in groups:
        for sample in group:
            if sample.status is Status.TRUNCATED:
                sample.remove_sample = True
