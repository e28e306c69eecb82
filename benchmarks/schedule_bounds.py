"""What a step of known cost must take, under each schedule."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from known_costs import Setting

MEAN_LENGTH, MAX_LENGTH = 250, 3000
LOCKSTEP, PIPELINED, STREAMED = "lockstep", "pipelined", "streamed gradients"


def response_length(seed: int, sigma: float) -> int:
    """Lognormal with mean ``MEAN_LENGTH``, whatever sigma, cut at ``MAX_LENGTH``."""
    normal = random.Random(seed).gauss(0.0, 1.0)
    length = MEAN_LENGTH * math.exp(sigma * normal - sigma**2 / 2)
    return min(max(1, round(length)), MAX_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGroup:
    """When the engine finishes a group, in seconds since its rollout's start, and how many tokens its rows have."""

    finished: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a step must take: see the columns of ``schedules.py``."""

    generation: float
    streamed: float
    path: float
    formula: float


def known_groups(requests: Sequence[dict[str, Any]], sigma: float, setting: Setting) -> dict[int, list[KnownGroup]]:
    """The groups of each rollout, from what the engine was asked, in that order."""
    rollouts: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for body in requests:
        task, prompt = str(body["rid"]).partition(":")[0], tuple(body["input_ids"])
        length = response_length(int(body["sampling_params"]["sampling_seed"]), sigma)
        rollouts.setdefault(int(task.removeprefix("train_")), []).append((prompt, length))
    return {rollout_id: _groups(responses, setting) for rollout_id, responses in rollouts.items()}


def _groups(responses: Sequence[tuple[tuple[int, ...], int]], setting: Setting) -> list[KnownGroup]:
    """Each response begins when a slot is free, in the order in which they were asked for."""
    free_at = [0.0] * (setting.slots or len(responses))
    finished: dict[tuple[int, ...], float] = {}
    tokens: dict[tuple[int, ...], int] = {}
    for prompt, length in responses:
        ended = heapq.heappop(free_at) + setting.decoded * length
        heapq.heappush(free_at, ended)
        finished[prompt] = max(ended, finished.get(prompt, 0.0))
        tokens[prompt] = tokens.get(prompt, 0) + len(prompt) + length
    return [KnownGroup(finished=finished[prompt], tokens=tokens[prompt]) for prompt in finished]


def bounds(schedule: str, groups: Sequence[KnownGroup], setting: Setting) -> Bounds:
    """The critical path of one step, and the formula's value."""
    generation = max(group.finished for group in groups)
    tokens = sum(group.tokens for group in groups)
    rest = setting.optimizer + setting.publish + (0.0 if schedule == STREAMED else setting.trained * tokens)
    # With streamed gradients one pass gives the old log-probabilities and the loss; else there is one for each model.
    rate = setting.forward + (setting.trained if schedule == STREAMED else setting.forward)
    streamed = rate * tokens
    if schedule == LOCKSTEP:
        whole = generation + streamed + rest
        return Bounds(generation=generation, streamed=streamed, path=whole, formula=whole)
    free = 0.0
    in_order = sorted(groups, key=lambda group: group.finished)
    for group in in_order:
        free = max(free, group.finished) + rate * group.tokens
    tail = rate * in_order[-1].tokens
    formula = max(generation, streamed - tail) + tail + rest
    return Bounds(generation=generation, streamed=streamed, path=free + rest, formula=formula)
