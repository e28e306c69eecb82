"""Prompt groups from data files: for training without end, epoch after epoch; for evaluation each set once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer_rl.args import Args
from buffer_rl.data.dataset import PromptDataset, PromptRow, RowKeys
from buffer_rl.data.difficulty import DifficultyIterator, Pool
from buffer_rl.data.eval_sets import eval_sets_of
from buffer_rl.data.options import DataOptions, check_sources, pool_weights
from buffer_rl.data.order import (
    Cursor,
    EpochIterator,
    JoinedOrder,
    MakeIterator,
    RowOrder,
    WeightedOrder,
    seed_of_source,
)
from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import CheckpointError, DataError
from buffer_rl.options.redaction import mask_url
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, prompt_copies

STATE_FORMAT = 2


def read_sources(options: DataOptions) -> list[PromptDataset]:
    """Every source of ``--prompt-data``, validated. Raises DataError, also where two hold the same rows and where
    no row of any has a field of ``--multimodal-keys``."""
    keys = RowKeys.from_args(options)
    datasets: list[PromptDataset] = []
    for source in options.prompt_data or ():
        dataset = read_dataset(source, keys)
        for earlier in datasets:
            if earlier.source_hash == dataset.source_hash:
                what = "the same rows come twice"
                hint = "name the source once, with a greater weight in --prompt-data-weights"
                raise DataError(what, where=mask_url(f"--prompt-data: {earlier.path} and {source}"), hint=hint)
        datasets.append(dataset)
    # Of all sources together: one with images may be mixed with one of text alone.
    for media, field in keys.multimodal:
        if all(media not in dataset.facts.media for dataset in datasets):
            what = f"no row of any source has the {media} field {field!r}"
            raise DataError(what, where="--multimodal-keys", hint="see the fields that the rows have")
    return datasets


def make_group(
    row: PromptRow, uid: GroupUid, *, num_samples: int, group_index: int, index: int, **facts: Any
) -> SampleGroup:
    """A group of empty samples for one row (see ``prompt_copies``).

    group_index: running number of the group; index: running number of its first sample; facts: further fields.
    """
    prompt = Sample(
        uid=uid,
        group_index=group_index,
        index=index,
        prompt=row.prompt,
        multimodal_inputs=row.multimodal,
        label=row.label,
        metadata=row.metadata,
    )
    return SampleGroup(uid=uid, samples=prompt_copies(prompt, num_samples), **facts)


SourceMark = tuple[Mapping[str, Any], list[tuple[NDArray[np.bool_], int]]]
"""A moment of a ``PromptDataSource``: its state; and of an order by difficulty, the rows that had left each iterator's
epoch, and how many it had leased."""


class PromptDataSource:
    """The training prompts (``--prompt-data``) in epoch order, without end. Not thread-safe.

    Several sources are one data set, or have shares of their own (``--prompt-data-weights``): see
    ``buffer_rl.data.order``. A group's uid names its source, the row in it, and the epoch that the row belongs to.

    args: the flat options; ``DataOptions``, ``n_samples_per_prompt`` and ``rollout_batch_size`` are read.
    Raises ConfigError without ``--prompt-data`` or for unfit weights, DataError for bad data.
    """

    def __init__(self, args: Args) -> None:
        options: DataOptions = args
        check_sources(options)
        datasets = read_sources(options)
        self._hashes = [dataset.source_hash for dataset in datasets]  # of what was read; a name may be older
        self._options = options
        self._weights = None if len(datasets) == 1 else options.prompt_data_weights
        self.pool_weights = pool_weights(options)
        self._use(datasets)
        self._samples_per_group: int = args.n_samples_per_prompt
        self._group_index = 0
        self._index = 0

    def _use(self, datasets: list[PromptDataset]) -> None:
        """Begin with the first row of ``datasets``."""
        self.datasets = datasets
        self._number_of = {dataset.source_hash: number for number, dataset in enumerate(datasets)}
        self._names = _names(datasets)
        self._loaded: list[Cursor] = []
        self._order = self._begun(datasets)
        self._places = {name: self._order.iterator_of(source) for name, source in self._number_of.items()}
        self._by_difficulty = [each for each in self._order.iterators if isinstance(each, DifficultyIterator)]

    def _begun(self, datasets: list[PromptDataset]) -> RowOrder:
        make: MakeIterator = partial(EpochIterator, shuffle=self._options.rollout_shuffle)
        if self.pool_weights is not None:
            make = partial(DifficultyIterator, shuffle=self._options.rollout_shuffle, weights=self.pool_weights)
        sizes = [len(dataset) for dataset in datasets]
        if self._weights is None:
            return JoinedOrder(make, sizes, seed=self._options.rollout_seed)
        seeds = [seed_of_source(self._options.rollout_seed, dataset.source_hash) for dataset in datasets]
        return WeightedOrder(make, sizes, self._weights, seeds=seeds)

    @property
    def has_changed(self) -> bool:
        """Whether the rows are others than those that gave the sources their names."""
        return self._hashes != self.source_hashes

    @property
    def source_hashes(self) -> list[str]:
        """Names the sources in the order of the option; the ``source`` of each group's uid."""
        return [dataset.source_hash for dataset in self.datasets]

    def __len__(self) -> int:
        """Number of rows of all sources."""
        return sum(len(dataset) for dataset in self.datasets)

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """The next ``num_samples`` **groups**, in epoch order."""
        return [drawn for drawn in self.draw(num_samples) if isinstance(drawn, SampleGroup)]

    def draw(self, num_samples: int) -> list[SampleGroup | GroupUid]:
        """The next ``num_samples`` groups, in epoch order. A uid without a group is that of a row that the order by
        difficulty passes over. Raises BufferStateError if all rows of that order have weight 0."""
        if num_samples < 0:
            raise ValueError(f"cannot hand out {num_samples} groups")
        drawn: list[SampleGroup | GroupUid] = []
        while num_samples:
            drawn.append(self._next())
            num_samples -= isinstance(drawn[-1], SampleGroup)
        return drawn

    def mark(self) -> SourceMark:
        """This moment, for ``back_to``."""
        return self.state_dict(), [(epochs.taken, epochs.num_drawn) for epochs in self._by_difficulty]

    def back_to(self, mark: SourceMark) -> None:
        """Return to a moment of this source, as if nothing was drawn since."""
        state, moments = mark
        if not self._by_difficulty:
            return self.load_state_dict(state)
        self._group_index, self._index = state["group_index"], state["index"]
        cursors = _cursors(state["cursors"], self._order)
        for epochs, (taken, num_drawn), cursor in zip(self._by_difficulty, moments, cursors, strict=True):
            epochs.back_to(cursor.epoch, taken, num_drawn)

    def take_rows(self, rows_of: Callable[[str, int], Iterable[int]]) -> None:
        """Of an order by difficulty, after ``load_state_dict``: go on beside the rows that left its epoch.

        rows_of: of a source and an epoch. Raises CheckpointError if their number is not what the state says."""
        for epochs, cursor in zip(self._by_difficulty, self._loaded, strict=True):
            firsts = {name: first for name, (iterator, first) in self._places.items() if iterator is epochs}
            epochs.take((first + row for name, first in firsts.items() for row in rows_of(name, cursor.epoch)), cursor)

    def set_rewards(self, rewards: Sequence[tuple[str, int, float]]) -> None:
        """Tell an order by difficulty the mean rewards of rows: source, row and mean, the later one of a row last."""
        means: dict[int, dict[int, float]] = {}
        for name, row, mean in rewards:
            if name in self._places:
                iterator, first = self._places[name]
                means.setdefault(id(iterator), {})[first + row] = mean
        for epochs in self._by_difficulty:
            epochs.set_rewards(means.get(id(epochs), {}))

    def pool_counts(self) -> dict[str, int]:
        """The number of rows in each pool of an order by difficulty; else none."""
        counts = [epochs.counts() for epochs in self._by_difficulty]
        return {pool.name.lower(): int(sum(of[pool] for of in counts)) for pool in Pool} if counts else {}

    def group_of(self, uid: GroupUid, number: int) -> SampleGroup:
        """The group ``uid`` made again; it was the ``number``-th that was drawn, counted from 0. Raises DataError
        for a foreign uid."""
        dataset = self._number_of.get(uid.source)
        if dataset is None or not 0 <= uid.row < len(self.datasets[dataset]):
            raise DataError(f"the group {uid} is not from this data source", where=", ".join(self.source_hashes))
        return self._group(uid, number, number * self._samples_per_group, self._samples_per_group)

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, as JSON values; the same sources go on from it exactly."""
        leased = [epochs.num_drawn for epochs in self._by_difficulty]
        return {
            "format": STATE_FORMAT,
            "sources": self.source_hashes,
            **({"hashes": self._hashes} if self.has_changed else {}),
            "weights": self._weights,
            "seed": self._options.rollout_seed,
            "shuffle": self._options.rollout_shuffle,
            "cursors": [list(each.cursor) for each in self._order.iterators],
            "group_index": self._group_index,
            "index": self._index,
            **({"order": "difficulty", "leased": leased} if leased else {}),
            "returned": [],  # groups that were given back, which the format has and no run writes
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``. Raises CheckpointError, changing nothing, if the state is of other data,
        of another order or damaged.

        Under ``--accept-changed-rows`` the data may be other data, of as many rows (which a run checks before it
        starts). The sources get the names that they have in the state: these are in the uids of its groups, and in the
        seeds of the order."""
        state = {"hashes": state.get("sources"), **state}
        datasets, names = self.datasets, state.get("sources")
        if isinstance(names, list) and len(names) == len(datasets):
            datasets = [replace(dataset, source_hash=str(name)) for dataset, name in zip(datasets, names, strict=True)]
        mine = {**self.state_dict(), "sources": [dataset.source_hash for dataset in datasets], "hashes": self._hashes}
        mine["order"], state["order"] = mine.get("order"), state.get("order")
        for name in ("format", "sources", "hashes", "weights", "seed", "shuffle", "order", "returned"):
            if (name not in state or state[name] != mine[name]) and not (
                name == "hashes" and self._options.accept_changed_rows
            ):
                raise CheckpointError(
                    f"the saved data sources have {name} {state.get(name)!r}, these {mine[name]!r}",
                    hint="resume with the data, weights, field names, --prompt-order and --rollout-seed of the saved "
                    "run; rows that were mended since: --accept-changed-rows",
                )
        cursors = _cursors(state.get("cursors"), self._order)
        group_index, index = (_count(state.get(name), name) for name in ("group_index", "index"))
        leased = [_count(number, "leased") for number in state.get("leased", ())]
        self._group_index, self._index = group_index, index
        self._use(datasets)
        for iterator, cursor in zip(self._order.iterators, cursors, strict=True):
            iterator.seek(cursor)
        self._loaded = cursors
        for epochs, number in zip(self._by_difficulty, leased, strict=True):
            epochs.num_drawn = number

    def _next(self) -> SampleGroup | GroupUid:
        """The next group, or the uid of a row that is passed over."""
        source, (row, epoch, is_passed) = self._order.next()
        uid = GroupUid(self.datasets[source].source_hash, row, epoch)
        drawn = uid if is_passed else self._group(uid, self._group_index, self._index, self._samples_per_group)
        self._group_index += 1
        self._index += self._samples_per_group
        return drawn

    def _group(self, uid: GroupUid, group_index: int, index: int, count: int) -> SampleGroup:
        number = self._number_of[uid.source]
        row, name = self.datasets[number][uid.row], self._names[number]
        return make_group(row, uid, num_samples=count, group_index=group_index, index=index, data_set=name)


class EvalSource:
    """The evaluation sets (``--eval-prompt-data``, ``--eval-config``), each read once, with its rows in file order.

    args: the flat options; ``DataOptions`` and ``EvalOptions`` are read. Raises ConfigError and DataError.
    """

    def __init__(self, args: Args) -> None:
        keys = RowKeys.of_evaluation(args)
        self._samples_per_group: int = args.n_samples_per_eval_prompt
        self._sets = {eval_set.name: eval_set for eval_set in eval_sets_of(args)}
        self.datasets: dict[str, PromptDataset] = {
            name: read_dataset(eval_set.path, eval_set.row_keys(keys)) for name, eval_set in self._sets.items()
        }

    def groups(self, name: str) -> list[SampleGroup]:
        """Fresh groups of one set in file order: ``data_set`` is its name, the epoch 0."""
        dataset, eval_set = self.datasets[name], self._sets[name]
        num_samples = eval_set.n_samples_per_eval_prompt or self._samples_per_group
        return [
            make_group(
                eval_set.adapt(row),
                # The name keeps two sets apart that read the same rows of one file.
                GroupUid(f"{name}@{dataset.source_hash}", row.row, 0),
                num_samples=num_samples,
                group_index=row.row,
                index=row.row * num_samples,
                data_set=name,
                sampling_params=eval_set.sampling_params(),
                rm_type=eval_set.chosen_reward() or "",
            )
            for row in dataset
        ]

    def all_groups(self) -> list[SampleGroup]:
        """Fresh groups of every set, one set after another."""
        return [group for name in self.datasets for group in self.groups(name)]


def _names(datasets: Sequence[PromptDataset]) -> list[str]:
    """Of each source the name of its file or folder; empty if there is one source, and for names that two have."""
    names = [PurePosixPath(dataset.path.partition("@[")[0]).name.partition(".")[0] for dataset in datasets]
    return [name if len(names) > 1 and names.count(name) == 1 else "" for name in names]


def _cursors(saved: Any, order: RowOrder) -> list[Cursor]:
    lengths = [each.num_rows for each in order.iterators]
    if not isinstance(saved, list) or len(saved) != len(lengths):
        raise CheckpointError(f"the saved cursors are {saved!r}", expected=f"{len(lengths)} of them")
    cursors = []
    for pair, length in zip(saved, lengths, strict=True):
        if not isinstance(pair, list) or len(pair) != 2:
            raise CheckpointError(f"the saved cursor is {pair!r}", expected="an epoch and a position")
        cursor = Cursor(_count(pair[0], "epoch"), _count(pair[1], "position"))
        if cursor.position > length:
            raise CheckpointError(f"the saved position {cursor.position} is beyond the {length} rows")
        cursors.append(cursor)
    return cursors


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"the saved {name} is {value!r}", expected="a count from 0")
    return value
