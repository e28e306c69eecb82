"""The records that travel between the parts of buffer_rl (standard library and numpy only).

``Sample`` and what it consists of are in ``buffer_rl.records.sample``, and are found here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableSequence, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast, overload

import numpy as np

from buffer_rl.records.ids import NO_UID as NO_UID
from buffer_rl.records.ids import GroupUid as GroupUid
from buffer_rl.records.ids import RowId as RowId
from buffer_rl.records.ids import VersionSpan as VersionSpan
from buffer_rl.records.ids import tile as tile
from buffer_rl.records.sample import Prompt as Prompt
from buffer_rl.records.sample import Sample as Sample
from buffer_rl.records.sample import Status as Status

T = TypeVar("T")

Column = np.ndarray | list[np.ndarray]
"""One field of several rows: an array ``[num_rows]``, or one array ``[num_tokens]`` per row."""


@dataclass(slots=True, kw_only=True)
class SampleGroup(Sequence[Sample]):
    """The samples of one prompt, leased together. Iterates, indexes and counts as the list of its samples.

    attempt and incarnation identify the lease: the Buffer refuses a report whose lease is not the live one.
    version: the weights that were published when the group was leased; None before the first lease.
    foreign: the rollout function made the group, and did not lease it; the framework sets it. Such a group may leave
    out its uid and those of its samples.
    data_set names the evaluation set that the group comes from, or the file of its row if training has several;
    otherwise it is empty.
    sampling_params: what that set says about sampling, under the names of SGLang's protocol; it is stronger than the
    options. rm_type: the registered reward that the set's configuration, and no row, names; empty where it names none.

    Example:
        uid = GroupUid(source="5c1f0a9be3d2", row=17, epoch=0)
        samples = [Sample(uid=uid, sample_index=index, prompt="2 + 3 =", label="5") for index in range(2)]
        group = SampleGroup(uid=uid, samples=samples, attempt=1, incarnation="1-9f2c")
        group[0].tokens, group[0].response, group[0].response_length = [5, 8, 6, 9, 1], "5", 2
        group[0].reward, group[0].status = 1.0, Status.COMPLETED
    """

    uid: GroupUid = NO_UID
    samples: list[Sample]
    attempt: int = 1
    incarnation: str = ""
    version: int | None = None
    data_set: str = ""
    sampling_params: dict[str, Any] = field(default_factory=dict)
    rm_type: str = ""
    foreign: bool = False

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    @property
    def is_fresh(self) -> bool:
        """Whether the samples are copies of one prompt that were not read yet, so that nothing was generated."""
        return isinstance(self.samples, LazyList) and not self.samples.is_made

    @property
    def rows(self) -> list[Sample]:
        """The rows to train on: the samples, each with the further rows of one that an agent played."""
        if self.is_fresh or not any("parts" in sample.__dict__ for sample in self.samples):
            return self.samples
        return [row for sample in self.samples for row in sample.rows]

    def by_sample(self) -> list[list[Sample]]:
        """The rows of each sample: its parts if it fanned out, else one."""
        if not any(sample.part for sample in self):
            return [[sample] for sample in self]
        rows: dict[int, list[Sample]] = {}
        for sample in self:
            rows.setdefault(sample.sample_index, []).append(sample)
        return list(rows.values())

    def rewards(self, args: Any) -> list[float]:
        """The reward of each sample that has one: the mean over its parts."""
        known = [[row.get_reward_value(args) for row in rows if row.reward is not None] for rows in self.by_sample()]
        return [math.fsum(values) / len(values) for values in known if values]

    def as_prompts(self, **changes: Any) -> SampleGroup:
        """A copy with the prompts alone: responses, rewards and versions are gone. changes: its other fields."""
        samples = cast("Any", self.samples).unmade() if self.is_fresh else [s.as_prompt() for s in self if s.part == 0]
        return replace(self, samples=samples, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueHeader:
    """What a buffer filter sees of one queued group.

    admitted: running number that the data source gave the group. prompt_length: characters of its text (the Buffer
    has no tokenizer). attempts: leases so far.
    reward: mean reward of an earlier attempt; None if there is none.
    version: the oldest weights that its tokens were sampled from; None for a group without tokens.
    """

    uid: GroupUid
    admitted: int
    prompt_length: int
    attempts: int = 0
    reward: float | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What ``Buffer.generate`` hands to the driver, and the driver to a rollout worker: one rollout to produce.

    num_groups: how many groups the step still needs (for an evaluation: how many prompts there are).
    version: the weights that were published when the ticket was opened.
    max_staleness: the schedule's bound. None where no weights are published, and versions say nothing.
    mixes_versions: weights may be published while requests run. A trained token is then of the version at its group's
    lease or of a later one, else of exactly that version.
    keeps_tokens: a group that is given back keeps what was generated of it so far.
    worker: number of the rollout worker; that of one that goes on where another died, or makes it again, is greater.
    The Buffer refuses calls of an earlier one. num_parts: how many workers share the ticket, of which ``num_groups``
    are this one's.

    Example:
        ticket = Ticket(rollout_id=7, evaluation=False, num_groups=2, version=7, incarnation="1-9f2c", max_staleness=0)
        assert ticket.task == "train_7"  # two groups, whose trained tokens are all of weights of version 7
    """

    rollout_id: int
    evaluation: bool
    num_groups: int
    version: int
    incarnation: str
    max_staleness: int | None = 0
    mixes_versions: bool = False
    keeps_tokens: bool = False
    worker: int = 1
    num_parts: int = 1

    @property
    def task(self) -> str:
        """Name of the pool that the rollout fills: ``train_{rollout_id}`` or ``eval_{rollout_id}``."""
        return f"{'eval' if self.evaluation else 'train'}_{self.rollout_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """How a ticket ended, or what a selection was closed with, counted by the Buffer.

    num_groups, num_rows: that were finished under the ticket, or that the step trains on.
    drops: rejected groups by reason; ``unreported`` counts leased groups that were never mentioned again.
    surplus: finished groups that the step does not need; they went back to the queue as prompts. Foreign ones, which
    have no place there, are among the drops.
    staleness: of each group of a selection whose rows have versions: the step minus the oldest version of its tokens.
    metrics: of a selection whose groups may be of several tickets, flat numbers (``selection_metrics``).
    """

    num_groups: int
    num_rows: int
    drops: dict[str, int] = field(default_factory=dict)
    surplus: int = 0
    staleness: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class RolloutOutput:
    """What a rollout function returns. A bare list of groups is accepted in its place.

    groups: finished groups that were not yet reported with ``buffer.finish``; may be empty.
    metrics: flat numbers, logged under ``rollout/``.

    Example:
        uid = GroupUid(source="5c1f0a9be3d2", row=17, epoch=0)
        sample = Sample(uid=uid, prompt="2 + 3 =", tokens=[5, 8, 6, 9, 1], response="5", response_length=2)
        sample.reward, sample.status, sample.weight_versions = 1.0, Status.COMPLETED, [VersionSpan(7, 0, 2)]
        RolloutOutput(groups=[SampleGroup(uid=uid, samples=[sample])], metrics={"mean_turns": 1.0})
    """

    groups: list[SampleGroup] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterDecision:
    """A dynamic sampling filter's answer; ``reason`` is counted and shown for dropped groups.

    keep_when_insufficient: keep a group that is not wanted where another would have to be generated in its place, that
    is, once ``--over-sampling-batch-size`` leaves no more groups than the step needs.
    """

    keep: bool
    reason: str = ""
    keep_when_insufficient: bool = False


SAMPLE_SIZES = ("sample_total_tokens", "sample_parts")
"""Columns of a sample's size that the Buffer writes (see ``TrainBatch``)."""


@dataclass(slots=True, kw_only=True)
class TrainBatch:
    """The rows of one task that one data-parallel rank trains on.

    columns: per row, in the order of ``row_ids``:
        ``tokens`` list of ``[num_tokens]`` int32 (prompt and response);
        ``response_length`` ``[num_rows]`` int32;
        ``loss_mask`` list of ``[response_length]`` float32;
        ``reward`` ``[num_rows]`` float32 after post-processing, ``raw_reward`` before it;
        ``baseline_reward`` ``[num_rows]`` float32, the reward of a greedy response, where the estimator needs it;
        ``turn_rewards`` list of ``[response_length]`` float32, under ``--turn-rewards``: what of the reward belongs to
        single turns, minus their sum at the last unmasked token;
        ``rollout_log_probs``, ``ref_log_probs``, ``teacher_log_probs``, ``old_log_probs``, ``advantages``, ``returns``
        lists of ``[response_length]`` float32, where they exist;
        ``kept_counts`` list of ``[response_length]`` int32 and ``kept_tokens`` list of ``[sum of its counts]`` int32,
        under ``--replay-kept-tokens``: see ``Sample.rollout_kept_tokens``;
        ``routed_experts`` list of ``[up to num_tokens - 1, layers, experts a token]`` uint8 or int16, under
        ``--replay-routed-experts``: see ``Sample.rollout_routed_experts``; tokens behind the last have none;
        ``sample_total_tokens`` and ``sample_parts`` ``[num_rows]`` float32, unmasked response tokens of the row's
        sample over all its parts, and how many these are, written by the Buffer.

    Example:
        uid = GroupUid(source="5c1f0a9be3d2", row=17, epoch=0)
        columns = {  # two rows, with a prompt of two tokens and responses of two tokens and of one
            "tokens": [np.array([5, 8, 9, 1], dtype=np.int32), np.array([5, 8, 7], dtype=np.int32)],
            "response_length": np.array([2, 1], dtype=np.int32),
            "loss_mask": [np.ones(2, dtype=np.float32), np.ones(1, dtype=np.float32)],
            "reward": np.array([0.5, -0.5], dtype=np.float32),
        }
        TrainBatch(rollout_id=7, task="train_7", row_ids=[RowId(uid, 0), RowId(uid, 1)], columns=columns)
    """

    rollout_id: int
    task: str
    row_ids: list[RowId]
    columns: dict[str, Column]

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row."""
        return [len(tokens) for tokens in self.columns.get("tokens", ())]

    def rows_without(self, name: str) -> list[RowId]:
        """The rows whose column ``name`` has NaN, which stands for a value that the rollout did not give, where a token
        is trained on. None for a column that is not there, or does not hold fractions."""
        masks = self.columns.get("loss_mask", self.row_ids)
        columns = map(np.asarray, self.columns.get(name, ()))
        return [
            row_id
            for row_id, values, mask in zip(self.row_ids, columns, masks, strict=False)
            if values.dtype.kind == "f"
            and np.isnan(values if values.shape != np.shape(mask) else values[np.asarray(mask) != 0]).any()
        ]

    def select(self, indices: Iterable[int]) -> TrainBatch:
        """The rows at ``indices``."""
        chosen = list(indices)
        return replace(
            self,
            row_ids=[self.row_ids[i] for i in chosen],
            columns={name: take_rows(column, chosen) for name, column in self.columns.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One rank's place among the ranks of a trainer.

    dp_rank, dp_size: the replica that the rank belongs to, of so many. All ranks of a replica get the same rows.
    is_head: the one rank of each replica whose sums, metrics and log-probabilities count (the last pipeline stage,
        tensor rank 0, context rank 0).
    in_step: a forward pass has a collective over replicas. All replicas then get their rows together, perhaps none, as
        often as each other; how many micro-batches each makes of them they agree on themselves.
    share: ``(number, count)`` if every rank has the tensors of ``Trainer.export``: each may send one of so many parts.

    Example:
        # Four ranks: two replicas of two pipeline stages each. Rank 1 is the source.
        places = [Topology(dp_rank=rank // 2, dp_size=2, is_head=rank % 2 == 1) for rank in range(4)]
        assert [place.is_source for place in places] == [False, True, False, False]
    """

    dp_rank: int
    dp_size: int
    is_head: bool = True
    in_step: bool = False
    share: tuple[int, int] | None = None

    @property
    def is_source(self) -> bool:
        """Whether the rank has the tensors of ``Trainer.export``: the head of replica 0."""
        return self.is_head and self.dp_rank == 0


def sample_means(samples: Iterable[Hashable], values: Iterable[float]) -> list[float]:
    """The mean of ``values`` over the parts of each sample, so that a sample counts once however many rows it is.

    samples: which sample each value belongs to, ``[num_rows]``. Returns ``[num_samples]``, in the order in which the
    samples first occur."""
    parts: dict[Hashable, list[float]] = {}
    for sample, value in zip(samples, values, strict=True):
        parts.setdefault(sample, []).append(value)
    return [float(own[0] if len(own) == 1 else np.mean(sorted(own))) for own in parts.values()]


REWARD_STD = 1e-6
"""Rewards that deviate by no more count as equal."""


def equal_rewards(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether rewards differ by rounding at most, ``[num_samples]``: their standard deviation (divisor n - 1) is at
    most ``REWARD_STD``, or 1e-9 of the largest of them. The one definition of filters, metrics and algorithms."""
    rewards_n = np.asarray(rewards, dtype=np.float64)
    if rewards_n.size < 2:
        return True
    low, high = float(rewards_n.min()), float(rewards_n.max())
    limit, spread = max(REWARD_STD, 1e-9 * max(-low, high)), high - low
    # spread / sqrt(2 n) < deviation < spread, and computing the deviation takes three times as long as both ends.
    if spread > limit * math.sqrt(2 * rewards_n.size):
        return False
    return spread <= limit < math.inf or bool(rewards_n.std(ddof=1) <= limit)


def take_rows(column: Column, indices: Sequence[int]) -> Column:
    """The rows of ``column`` at ``indices``, in that order."""
    if isinstance(column, np.ndarray):
        return column[np.asarray(indices, dtype=np.int64)]
    return [column[i] for i in indices]


class LazyList(MutableSequence[T]):
    """A list of ``length`` items, made by ``make(*args)`` when an item is first read or written.

    Pickled before that, it is ``make`` and ``args``, and arrives as the list that these give; afterwards it is a list.
    Whatever ``args`` hold is shared by all lists that are made of them, so ``make`` copies what may be changed.
    """

    def __init__(self, length: int, make: Callable[..., list[T]], *args: Any) -> None:
        self._source = length, make, args
        self._made: list[T] | None = None

    @property
    def is_made(self) -> bool:
        """Whether an item was read or written."""
        return self._made is not None

    def unmade(self) -> LazyList[T]:
        """The list as it was before an item was read."""
        length, make, args = self._source
        return LazyList(length, make, *args)

    @property
    def _items(self) -> list[T]:
        if self._made is None:
            _, make, args = self._source
            self._made = make(*args)
        return self._made

    def __len__(self) -> int:
        return self._source[0] if self._made is None else len(self._made)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._items[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._items[index]

    def insert(self, index: int, value: T) -> None:
        self._items.insert(index, value)

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self._items, *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self._items]

    def copy(self) -> list[T]:
        """A list of the items."""
        return [*self._items]

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        """As of a list."""
        self._items.sort(key=key, reverse=reverse)

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, LazyList) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[Any, ...]:
        _, make, args = self._source
        return (make, args) if self._made is None else (list, (self._made,))


def prompt_copies(prompt: Sample, count: int) -> list[Sample]:
    """``count`` copies of one prompt, made when they are first read. Their ``sample_index`` and ``index`` count up from
    those of ``prompt``; they share no value that can be changed, multimodal ones excepted: these may be large."""
    return cast("list[Sample]", LazyList(count, _copies, prompt, count))


def _copies(prompt: Sample, count: int) -> list[Sample]:
    def copied(value: Any) -> Any:
        return value if value is None or isinstance(value, str) else deepcopy(value)

    return [prompt.as_prompt(number, copied) for number in range(count)]
