"""Records and functions of dynamic sampling filters under slime's names."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from buffer_rl.records.groups import Sample, SampleGroup, equal_rewards


@dataclass
class DynamicFilterOutput:
    """A filter's answer. keep_when_insufficient: keep a group that is not wanted where another would have to be
    generated in its place."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """The filter's answer as a record; a group is kept where there is no filter."""
    answer: Any = DynamicFilterOutput(keep=True) if fn is None else fn(*args, **kwargs)
    return answer if hasattr(answer, "keep") else DynamicFilterOutput(keep=answer)


def should_drop_dynamic_filter_output(output: Any, *, remaining_batch_size: int, target_data_size: int) -> bool:
    """Whether to drop the group: not where it may stay and only ``target_data_size`` groups or fewer remain."""
    may_stay = getattr(output, "keep_when_insufficient", False) and remaining_batch_size <= target_data_size
    return not output.keep and not may_stay


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one group; those without a reason are not counted."""
        if reason:
            self._drops[reason] += 1

    def collect(self) -> dict[str, int]:
        """The counts, as metrics."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._drops.items()}


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample | list[Sample]], **kwargs: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ (``buffer_rl.records.groups.equal_rewards``). The reason of a drop is slime's.

    In place of a sample there may be the list of its parts, which counts once, with the mean of their rewards."""
    entries = samples.by_sample() if isinstance(samples, SampleGroup) else samples
    parts = [entry if isinstance(entry, list) else [entry] for entry in entries]
    rewards = [statistics.fmean(part.get_reward_value(args) for part in own) for own in parts]
    keep = not equal_rewards(rewards)
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Sequence[Sample | list[Sample]], **kwargs: Any
) -> DynamicFilterOutput:
    """The same, where a group that is not wanted may stay before others are generated."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
