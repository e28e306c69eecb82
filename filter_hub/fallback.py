"""Filters that let some of what they drop through, so that a rollout in which nothing passes still ends.

Source: dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2) generates until enough groups pass,
without end where none does. The fallback is ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import FilterDecision, SampleGroup
from filter_hub.reward_deviation import nonzero

KEEP_ONE_IN = 32

Filter = Callable[[Any, SampleGroup], FilterDecision]


def nonzero_or_some(args: Any, group: SampleGroup) -> FilterDecision:
    """As ``filter_hub.reward_deviation:nonzero``, but one in 32 of the groups that it drops is kept."""
    return _or_some(nonzero, KEEP_ONE_IN, args, group)


def with_fallback(filter: Filter, *, keep_one_in: int = KEEP_ONE_IN) -> Filter:
    """A filter that keeps what ``filter`` keeps, and on average one in ``keep_one_in`` of what it drops.

    Which ones depends on the group's uid alone, so that no state is kept, equal runs keep equal groups, and it does not
    matter which worker asks. Where a share p passes, a share (1 - p) / (1 - p + keep_one_in * p) of the kept groups
    are such. A group without any reward is never kept. Raises ConfigError unless ``keep_one_in`` is at least 1.
    """
    if keep_one_in < 1:
        raise ConfigError(f"keep_one_in is {keep_one_in!r}", where="with_fallback", expected="a whole number >= 1")

    def or_some(args: Any, group: SampleGroup) -> FilterDecision:
        return _or_some(filter, keep_one_in, args, group)

    return or_some


def _or_some(filter: Filter, keep_one_in: int, args: Any, group: SampleGroup) -> FilterDecision:
    decision = filter(args, group)
    if decision.keep or all(sample.reward is None for sample in group):
        return decision
    digest = hashlib.blake2b(str(group.uid).encode(), digest_size=8).digest()
    if int.from_bytes(digest, "big") % keep_one_in == 0:
        return FilterDecision(keep=True)
    return decision
