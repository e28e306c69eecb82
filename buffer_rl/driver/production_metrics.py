"""The metrics of a step, from those of the tickets that produced its groups.

At a staleness of 0 a step and its ticket are of the same groups, and so are their metrics. Else a step trains on groups
of several tickets, and some of a ticket's groups wait for later steps: ``rollout/*`` are of the step's rows, as the
Buffer reports them, and ``production/*`` of the tickets that ended since the step before.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from buffer_rl.observe.memory import PEAK_PREFIX
from buffer_rl.observe.metrics import drop_metrics
from buffer_rl.records.groups import RolloutReport

LENGTH = "response_len/mean"
LONGEST = "response_len/max"
TOKENS = "generated_tokens"
_REWARD, _REWARD_STD = "rollout/raw_reward", "rollout/raw_reward_std"
_REWARD_ALL, _SCORED = "rollout/raw_reward_all", "rollout/scored_groups"
_COUNTS = (TOKENS, "abstained", "aborted_groups", "surplus_groups", "service_partial")
_SUMS = frozenset({_SCORED, *(f"rollout/{name}" for name in _COUNTS)})
"""Counts of a rollout, beside failures and dropped groups."""
_DROPS = ("drop_", "service_drop_")


@dataclass(frozen=True, slots=True)
class EndedTicket:
    """What a rollout worker reported of a ticket, some samples to show, and what the Buffer counted. closed: of its
    step, if its selection was closed with it."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    report: RolloutReport
    closed: RolloutReport | None = None

    @property
    def all_metrics(self) -> dict[str, float]:
        """With the dropped groups, by reason."""
        return {**self.metrics, **drop_metrics(self.report.drops)}


@dataclass(slots=True)
class _Lengths:
    """A mean over groups, from means over some of them."""

    total: float = 0.0
    num_groups: int = 0

    def add(self, mean: float | None, num_groups: int) -> None:
        if mean is not None:
            self.total += mean * num_groups
            self.num_groups += num_groups

    @property
    def mean(self) -> float:
        return self.total / self.num_groups if self.num_groups else 0.0


@dataclass(slots=True)
class ProductionMetrics:
    """Joins the metrics of tickets into those of steps. now: seconds since some fixed moment."""

    now: Callable[[], float]
    _trained: _Lengths = field(default_factory=_Lengths)
    _offered: _Lengths = field(default_factory=_Lengths)
    _counted_at: float | None = None

    def begin(self) -> None:
        """A ticket opens: from the first one on, generated tokens are counted."""
        if self._counted_at is None:
            self._counted_at = self.now()

    def of_both(self, ticket: EndedTicket, selection: RolloutReport) -> dict[str, float]:
        """At a staleness of 0: the metrics of a step, which are those of its ticket."""
        drops = drop_metrics(Counter(selection.drops) + Counter(ticket.report.drops))
        of_rows = selection.metrics  # if several workers had parts of the ticket
        return {**ticket.metrics, **of_rows, **drops, "rollout/num_groups": float(selection.num_groups)}

    def of_selection(self, selection: RolloutReport) -> dict[str, float]:
        """Else: the metrics of what a step trains on."""
        metrics = {**selection.metrics, **drop_metrics(selection.drops)}
        metrics["rollout/num_groups"] = float(selection.num_groups)
        if staleness := selection.staleness:
            metrics |= {"staleness/mean": sum(staleness) / len(staleness), "staleness/max": float(max(staleness))}
        self._trained.add(selection.metrics.get(f"rollout/{LENGTH}"), selection.num_groups)
        return metrics

    def of_tickets(self, ended: Sequence[EndedTicket]) -> dict[str, float]:
        """The metrics of the tickets that ended since the step before, and over what was trained on until now."""
        num_groups = [ticket.report.num_groups for ticket in ended]
        joined = joined_metrics([ticket.all_metrics for ticket in ended], num_groups)
        metrics = {re.sub("^rollout/", "production/", name): value for name, value in joined.items()}
        metrics["production/tickets"] = float(len(ended))
        for ticket in ended:
            self._offered.add(ticket.metrics.get(f"rollout/{LENGTH}"), ticket.report.num_groups)
        if self._trained.mean and self._offered.mean:
            metrics["production/length_ratio"] = self._trained.mean / self._offered.mean
        return metrics | self._rate(metrics.get(f"production/{TOKENS}"))

    def _rate(self, generated_tokens: float | None) -> dict[str, float]:
        """Per second since tokens were counted before: a step in which no ticket ended is part of the next one's."""
        if generated_tokens is None or self._counted_at is None:
            return {}
        before, self._counted_at = self._counted_at, self.now()
        seconds = self._counted_at - before
        return {"perf/tokens_per_s": generated_tokens / seconds} if seconds > 0 else {}


def joined_metrics(parts: Sequence[Mapping[str, float]], num_groups: Sequence[int]) -> dict[str, float]:
    """The metrics of several tickets, or of the parts of one, as they would be of all their groups at once: sums of
    counts, the longest response and the peak memory of all, the deviation of all rewards from their common mean, else
    means over those that have them. num_groups: of each part, its weight in a mean over kept groups."""
    joined: dict[str, float] = {}
    kept = num_groups if any(num_groups) else [1] * len(parts)
    for name in dict.fromkeys(name for part in parts for name in part):
        weights = _scored_groups(parts) if name == _REWARD_ALL else None
        having = [(part, weight) for part, weight in zip(parts, weights or kept, strict=True) if name in part]
        values = [part[name] for part, _ in having]
        if name in _SUMS or name.rpartition("/")[2].startswith(_DROPS) or name.endswith("_failures"):
            joined[name] = sum(values)
        elif name == _REWARD_STD and all(_REWARD in part for part, _ in having):
            joined[name] = _pooled_std(having)
        else:
            is_peak = name == f"rollout/{LONGEST}" or name.startswith(PEAK_PREFIX)
            joined[name] = max(values) if is_peak else _mean([(part[name], weight) for part, weight in having])
    return joined


def _scored_groups(parts: Sequence[Mapping[str, float]]) -> list[float] | None:
    """What a mean with dropped groups is over; None if a part does not say it, as a rollout function of one's own."""
    if any(_REWARD_ALL in part and not part.get(_SCORED) for part in parts):
        return None
    return [part.get(_SCORED, 0.0) for part in parts]


def _pooled_std(having: Sequence[tuple[Mapping[str, float], float]]) -> float:
    """The standard deviation of all parts' rewards: their deviations inside the parts, and those of the parts' means
    from the mean of all, which a mean of deviations would leave out."""
    mean = _mean([(part[_REWARD], weight) for part, weight in having])
    squares = [(part[_REWARD_STD] ** 2 + (part[_REWARD] - mean) ** 2, weight) for part, weight in having]
    return math.sqrt(_mean(squares))


def _mean(having: Sequence[tuple[float, float]]) -> float:
    if total := sum(weight for _, weight in having):
        return sum(value * weight for value, weight in having) / total
    return sum(value for value, _ in having) / len(having)
