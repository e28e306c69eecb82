"""The counts of one rollout while it runs, and its metrics."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from buffer_rl.args import Args
from buffer_rl.errors import RolloutError
from buffer_rl.observe.metrics import drop_metrics
from buffer_rl.records.groups import Sample, SampleGroup, Status, equal_rewards, sample_means
from buffer_rl.rollout.options import plays_agents

OF_KEPT = frozenset(
    {"raw_reward", "raw_reward_std", "response_len/mean", "response_len/max", "truncated_ratio", "zero_std"}
)
"""The metrics of finished groups, whatever the function that finished them."""


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


def rewards_of(args: Args, samples: Iterable[Sample]) -> list[float | None]:
    """The number of each sample's reward, ``[num_rows]``; None where there is none."""

    def reward_of(sample: Sample) -> float | None:
        try:
            return None if sample.reward is None else sample.get_reward_value(args)
        except (TypeError, ValueError):  # what finishes the group says what is wrong with it
            return None

    return [reward_of(sample) for sample in samples]


def sampled_tokens(rows: Iterable[Sample]) -> int:
    """The response tokens of rows without those of tools and environments, whose loss mask is 0."""
    return sum(
        # Of whatever a user's function set: what finishes the group says what is wrong with it.
        row.response_length if row.loss_mask is None else int(np.count_nonzero(np.asarray(row.loss_mask, dtype=object)))
        for row in rows
    )


def penalised_lengths(args: Args, samples: Iterable[Sample]) -> np.ndarray:
    """The lengths that penalties are about, ``[num_samples]``: of agents' samples the sampled tokens, each once."""
    by_agents = plays_agents(args)
    return np.asarray([sampled_tokens(sample.rows) if by_agents else sample.response_length for sample in samples])


def known_reward(args: Args, group: SampleGroup) -> float | None:
    """The mean reward of a group's samples, for an order by difficulty; None without such an order, and if no sample
    has a reward. A sample of several parts counts once."""
    if args.prompt_order != "difficulty":
        return None
    means = known_means(group, rewards_of(args, group))
    return math.fsum(means) / len(means) if means else None


def reward_entries(rows: Iterable[Sample]) -> dict[str, list[float]]:
    """The numbers in the rewards of one sample's rows, by name, if they are mappings or of several rewards; of a reward
    that abstained, none."""
    found: dict[str, list[float]] = {}
    for row in rows:
        entries = row.reward.items() if isinstance(row.reward, dict) else ()
        numbers = {str(name): value for name, value in entries if isinstance(value, int | float)}
        for name, value in (numbers | row.__dict__.get("rewards_by_name", {})).items():
            found.setdefault(name, []).extend([] if value is None else [float(value)])
    return found


@dataclass(slots=True, kw_only=True)
class RolloutStats:
    """Counts and numbers of one rollout. Rewards and lengths are those of the kept samples, before filters mask; a
    sample of several parts counts once, with the mean of its parts.

    has_filter: whether a dynamic filter decides which groups are kept. filtered_rewards: those of the groups that it
    dropped, num_filtered in number.
    num_aborted_groups, num_surplus_groups: groups of an over-sampled rollout that were not needed, and were requeued
    in mid-generation or fully generated. failures: failed attempts at groups, by domain (``infra``, ``data``).
    baselines: of the kept groups, ``[num_kept]``, where there are any. by_name: rewards of kept samples by the name
    that their rows chose, or of an entry of theirs, and by that and the data set; None of those that abstained.
    """

    has_filter: bool = False
    rewards: list[float] = field(default_factory=list)
    filtered_rewards: list[float] = field(default_factory=list)
    num_filtered: int = 0
    response_lengths: list[float] = field(default_factory=list)
    longest: int = 0
    truncated: list[float] = field(default_factory=list)
    num_kept: int = 0
    baselines: list[float] = field(default_factory=list)
    by_name: dict[str, list[float | None]] = field(default_factory=dict)
    num_zero_std: int = 0
    generated_tokens: int = 0
    num_aborted_groups: int = 0
    num_surplus_groups: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    num_quarantined: int = 0
    generating: BusyClock = field(default_factory=BusyClock)
    scoring: BusyClock = field(default_factory=BusyClock)

    def count_generated(self, group: SampleGroup, num_before: int = 0) -> None:
        """Count the sampled tokens of a group, kept or not, but for ``num_before`` of them from an earlier lease."""
        self.generated_tokens += max(0, sampled_tokens(group.rows) - num_before)

    def count_kept(self, group: SampleGroup, rewards: Sequence[float | None]) -> None:
        """Count a group that was kept; ``rewards`` as ``rewards_of`` gives them."""
        indices = [sample.sample_index for sample in group]
        means = known_means(group, rewards)
        self.num_kept += 1
        self.rewards += means
        lengths = [row.response_length for row in group.rows]
        self.response_lengths += sample_means([row.sample_index for row in group.rows], lengths)
        self.longest = max([self.longest, *lengths])
        self.truncated += sample_means(indices, [sample.status is Status.TRUNCATED for sample in group])
        self.num_zero_std += bool(means) and equal_rewards(means)
        for rows in group.by_sample():
            for name, known in reward_entries(rows).items():
                for shown in {name, f"{name}/{group.data_set}" if group.data_set else name}:
                    self.by_name.setdefault(shown, []).append(float(np.mean(sorted(known))) if known else None)

    def count_filtered(self, group: SampleGroup, rewards: Sequence[float | None]) -> None:
        """Count a scored group that the dynamic filter dropped; ``rewards`` as ``rewards_of`` gives them."""
        self.filtered_rewards += known_means(group, rewards)
        self.num_filtered += 1

    def metrics(self) -> dict[str, float]:
        """Flat numbers. Names that begin with ``perf/`` are complete; the others go under ``rollout/``."""
        values = {
            "generated_tokens": float(self.generated_tokens),
            "perf/generate_time": self.generating.seconds,
            "perf/reward_time": self.scoring.seconds,
        }
        if self.num_aborted_groups or self.num_surplus_groups:
            values["aborted_groups"] = float(self.num_aborted_groups)
            values["surplus_groups"] = float(self.num_surplus_groups)
        values.update({f"{domain}_failures": float(count) for domain, count in sorted(self.failures.items())})
        if self.num_quarantined:
            values["drop_quarantined"] = float(self.num_quarantined)
        values |= drop_metrics(self.drops, "drop_")
        return values | self.metrics_of_kept()

    def metrics_of_kept(self) -> dict[str, float]:
        """Rewards, lengths and truncation of the kept groups, and ``raw_reward_all`` with those that a filter dropped;
        metrics without values are left out."""
        values: dict[str, float] = {}
        if self.rewards:
            rewards = sorted(self.rewards)  # they came in the order of time; the last bits of a sum depend on its order
            values |= {"raw_reward": float(np.mean(rewards)), "raw_reward_std": float(np.std(rewards))}
        if self.has_filter and (scored := sorted([*self.rewards, *self.filtered_rewards])):
            values |= {
                "raw_reward_all": float(np.mean(scored)),
                "scored_groups": float(self.num_kept + self.num_filtered),
            }
        for name, given in sorted(self.by_name.items()):
            if known := sorted(reward for reward in given if reward is not None):
                values[f"reward/{name}"] = float(np.mean(known))
        if abstained := sum(given.count(None) for name, given in self.by_name.items() if "/" not in name):
            values["abstained"] = float(abstained)
        if self.baselines:
            values["baseline_reward"] = float(np.mean(sorted(self.baselines)))
        if self.response_lengths:
            values |= {
                "response_len/mean": float(np.mean(sorted(self.response_lengths))),
                "response_len/max": float(self.longest),
                "truncated_ratio": float(np.mean(sorted(self.truncated))),
                "zero_std": self.num_zero_std / self.num_kept,
            }
        return values

    def drops_text(self) -> str:
        """``12 dropped (zero_std: 10, aborted: 2)``."""
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.drops.most_common())
        return f"{self.drops.total()} dropped" + (f" ({reasons})" if reasons else "")

    def require_few_drops(self, args: Args, task: str, hint: str, *, kept: str = "", see: str = "") -> None:
        """Raises RolloutError beyond ``--dynamic-sampling-max-drops``. kept: what it says of the other groups."""
        # Of a whole step: another worker may have finished most of it.
        limit = args.dynamic_sampling_max_drops * args.rollout_batch_size
        if self.drops.total() > limit:
            expected = f"at most {limit} drops (--dynamic-sampling-max-drops for each wanted group)"
            raise RolloutError(f"{self.drops_text()}{kept}", where=task, expected=expected, hint=hint, see=see)


def known_means(group: SampleGroup, rewards: Sequence[float | None]) -> list[float]:
    """The reward of each sample that has one: the mean over its parts. rewards: of the rows."""
    known = [(s.sample_index, reward) for s, reward in zip(group, rewards, strict=True) if reward is not None]
    return sample_means([index for index, _ in known], [reward for _, reward in known])
