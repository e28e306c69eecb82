"""What one rollout counts while it runs, and the metrics made of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from buffer_rl.types import SampleGroup, Status


class BusyClock:
    """Seconds during which at least one of many concurrent activities was under way."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._running = 0
        self._since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the enclosed code as one activity."""
        if self._running == 0:
            self._since = time.perf_counter()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self.seconds += time.perf_counter() - self._since


@dataclass(slots=True, kw_only=True)
class RolloutStats:
    """Counts and numbers of one rollout. Rewards and lengths are those of the kept samples, before filters mask.

    num_aborted_groups, num_surplus_groups: groups of an over-sampled rollout that were not needed, and went back to
    the queue in mid-generation or generated. failures: failed attempts at groups, by domain (``infra``, ``data``).
    """

    rewards: list[float] = field(default_factory=list)
    response_lengths: list[int] = field(default_factory=list)
    num_kept: int = 0
    num_truncated: int = 0
    num_zero_std: int = 0
    generated_tokens: int = 0
    num_aborted_groups: int = 0
    num_surplus_groups: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    num_quarantined: int = 0
    generating: BusyClock = field(default_factory=BusyClock)
    scoring: BusyClock = field(default_factory=BusyClock)
    started: float = field(default_factory=time.perf_counter)

    def count_generated(self, group: SampleGroup, num_before: int = 0) -> None:
        """Count the tokens of a group, kept or not, but for the ``num_before`` that it had from an earlier lease."""
        self.generated_tokens += max(0, sum(sample.response_length for sample in group) - num_before)

    def count_kept(self, group: SampleGroup, rewards: list[float]) -> None:
        """Count a group that was kept; ``rewards`` holds one number a sample."""
        self.num_kept += 1
        self.rewards.extend(rewards)
        self.response_lengths.extend(sample.response_length for sample in group)
        self.num_truncated += sum(sample.status is Status.TRUNCATED for sample in group)
        self.num_zero_std += max(rewards) == min(rewards)

    def metrics(self) -> dict[str, float]:
        """Flat numbers. Names that begin with ``perf/`` are complete; the others go under ``rollout/``."""
        elapsed = time.perf_counter() - self.started
        values = {
            "generated_tokens": float(self.generated_tokens),
            "perf/rollout_time": elapsed,
            "perf/generate_time": self.generating.seconds,
            "perf/reward_time": self.scoring.seconds,
            "perf/tokens_per_second": self.generated_tokens / elapsed,
        }
        if self.num_aborted_groups or self.num_surplus_groups:
            values["aborted_groups"] = float(self.num_aborted_groups)
            values["surplus_groups"] = float(self.num_surplus_groups)
        values.update({f"{domain}_failures": float(count) for domain, count in sorted(self.failures.items())})
        if self.num_quarantined:
            values["drop_quarantined"] = float(self.num_quarantined)
        values.update({f"drop_{reason}": float(count) for reason, count in sorted(self.drops.items())})
        if self.rewards:
            rewards = sorted(self.rewards)  # they came in the order of time; the last bits of a sum depend on its order
            values |= {
                "raw_reward": float(np.mean(rewards)),
                "raw_reward_std": float(np.std(rewards)),
                "response_len/mean": float(np.mean(self.response_lengths)),
                "response_len/max": float(max(self.response_lengths)),
                "truncated_ratio": self.num_truncated / len(self.rewards),
                "zero_std": self.num_zero_std / self.num_kept,
            }
        return values

    def drops_text(self) -> str:
        """``12 dropped (zero_std: 10, aborted: 2)``."""
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.drops.most_common())
        return f"{self.drops.total()} dropped" + (f" ({reasons})" if reasons else "")
