"""Buffer filters: which of the queued groups are leased next.

Each answers with at most ``num_samples`` of the headers that it was given; ties go to the group admitted first, so
that an order never depends on how the queue is stored. Source: first-in is the ``pop_first`` of slime
(https://github.com/THUDM/slime); freshest bounds staleness as in AReaL (Fu et al. 2025, arXiv:2505.24298, section
5.1); by length and by reward are curricula (Bengio et al. 2009, Curriculum learning, ICML).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

from buffer_rl.records.groups import QueueHeader


def first_in(args: Any, rollout_id: int, buffer: Sequence[QueueHeader], num_samples: int) -> list[QueueHeader]:
    """The groups admitted first."""
    return _smallest(buffer, num_samples, lambda header: 0)


def freshest(args: Any, rollout_id: int, buffer: Sequence[QueueHeader], num_samples: int) -> list[QueueHeader]:
    """Groups without tokens (everything of theirs will be of today's weights), then those of the newest weights."""
    return _smallest(buffer, num_samples, lambda header: -math.inf if header.version is None else -header.version)


def shortest(args: Any, rollout_id: int, buffer: Sequence[QueueHeader], num_samples: int) -> list[QueueHeader]:
    """The shortest prompts."""
    return _smallest(buffer, num_samples, lambda header: header.prompt_length)


def longest(args: Any, rollout_id: int, buffer: Sequence[QueueHeader], num_samples: int) -> list[QueueHeader]:
    """The longest prompts: what takes longest is started first."""
    return _smallest(buffer, num_samples, lambda header: -header.prompt_length)


def highest_reward(args: Any, rollout_id: int, buffer: Sequence[QueueHeader], num_samples: int) -> list[QueueHeader]:
    """The groups with the highest mean reward so far; those without one come last."""
    return _smallest(buffer, num_samples, lambda header: math.inf if header.reward is None else -header.reward)


def lowest_reward(args: Any, rollout_id: int, buffer: Sequence[QueueHeader], num_samples: int) -> list[QueueHeader]:
    """The groups with the lowest mean reward so far; those without one come last."""
    return _smallest(buffer, num_samples, lambda header: math.inf if header.reward is None else header.reward)


def _smallest(
    buffer: Sequence[QueueHeader], num_samples: int, key: Callable[[QueueHeader], float]
) -> list[QueueHeader]:
    return heapq.nsmallest(num_samples, buffer, key=lambda header: (key(header), header.admitted))
