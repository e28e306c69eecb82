"""Prompt groups from JSONL: for training without end, epoch after epoch; for evaluation each set once."""

from __future__ import annotations

import copy
import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from buffer_rl.data.dataset import PromptDataset, PromptRow
from buffer_rl.data.eval_sets import parse_eval_sets
from buffer_rl.data.options import DataOptions
from buffer_rl.data.order import epoch_order
from buffer_rl.data.reader import read_dataset
from buffer_rl.data.row import RowKeys
from buffer_rl.errors import CheckpointError, ConfigError, DataError
from buffer_rl.types import GroupUid, Sample, SampleGroup

STATE_FORMAT = 1


class _EvalArgs(Protocol):
    @property
    def eval_prompt_data(self) -> list[str]: ...
    @property
    def n_samples_per_eval_prompt(self) -> int: ...


class JsonlDataSource:
    """The training prompts (``--prompt-data``) in epoch order, without end. A ``DataSource``; not thread-safe.

    args: the flat options; ``DataOptions``, ``n_samples_per_prompt`` and ``rollout_batch_size`` are read.
    Raises ConfigError without ``--prompt-data`` and DataError for bad data.
    """

    def __init__(self, args: Any) -> None:
        options: DataOptions = args
        if options.prompt_data is None:
            raise ConfigError("there are no training prompts", where="--prompt-data")
        self.dataset: PromptDataset = read_dataset(options.prompt_data, RowKeys.from_args(options))
        self._seed = options.rollout_seed
        self._shuffle = options.rollout_shuffle
        self._samples_per_group: int = args.n_samples_per_prompt
        self._groups_per_rollout: int = args.rollout_batch_size
        self._group_index = 0
        self._index = 0
        self._returned: deque[SampleGroup] = deque()
        self._enter(epoch=0, position=0)

    @property
    def source_hash(self) -> str:
        """Names the data; the ``source`` of each group's uid."""
        return self.dataset.source_hash

    @property
    def epoch(self) -> int:
        """The epoch of the next new group, if it has rows left; from 0."""
        return self._epoch

    def __len__(self) -> int:
        """Number of rows of one epoch."""
        return len(self.dataset)

    def get_num_rollout_per_epoch(self) -> int:
        """Whole rollouts in one epoch, at least 1. A tail smaller than a rollout belongs to the next epoch."""
        return max(1, len(self.dataset) // self._groups_per_rollout)

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """The next ``num_samples`` **groups**: first those given back, then rows in epoch order."""
        if num_samples < 0:
            raise ValueError(f"cannot hand out {num_samples} groups")
        return [self._returned.popleft() if self._returned else self._next_group() for _ in range(num_samples)]

    def add_samples(self, groups: list[SampleGroup]) -> None:
        """Take groups back, as prompts only; they are handed out again first. Raises DataError for foreign groups."""
        for group in groups:
            if group.uid.source != self.source_hash or not 0 <= group.uid.row < len(self.dataset):
                raise DataError(f"the group {group.uid} is not from this data source", where=self.source_hash)
        self._returned.extend(group.as_prompts() for group in groups)

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, as JSON values; the same source goes on from it exactly."""
        return {
            "format": STATE_FORMAT,
            "source_hash": self.source_hash,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "group_index": self._group_index,
            "index": self._index,
            "returned": [
                [group.uid.row, group.uid.epoch, group[0].group_index, group[0].index, len(group)]
                for group in self._returned
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``. Raises CheckpointError, changing nothing, if the state is of other data,
        of another order or damaged."""
        mine = self.state_dict()
        for name in ("format", "source_hash", "seed", "shuffle"):
            if state.get(name) != mine[name]:
                raise CheckpointError(
                    f"the saved data source has {name} {state.get(name)!r}, this one {mine[name]!r}",
                    hint="resume with the data, field names and --rollout-seed of the saved run",
                )
        epoch, position, group_index, index = (
            _count(state, name) for name in ("epoch", "position", "group_index", "index")
        )
        if position > len(self.dataset):
            raise CheckpointError(f"the saved position {position} is beyond the {len(self.dataset)} rows")
        try:
            returned = [self._group(self.dataset[row], *rest) for row, *rest in state["returned"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved groups that were given back are damaged: {error!r}") from error
        self._group_index, self._index, self._returned = group_index, index, deque(returned)
        self._enter(epoch=epoch, position=position)

    def save(self, path: str) -> None:
        """Write the state as JSON: temporary file, fsync, rename."""
        temporary = f"{path}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(self.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def load(self, path: str) -> None:
        """Read what ``save`` wrote. Raises CheckpointError if it is missing, damaged or of other data."""
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read the data source's state: {error}", where=path) from error
        if not isinstance(state, dict):
            raise CheckpointError("the data source's state is not a mapping", where=path)
        self.load_state_dict(state)

    def _enter(self, *, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order: NDArray[np.int64] = epoch_order(
            len(self.dataset), seed=self._seed, epoch=epoch, shuffle=self._shuffle
        )

    def _next_group(self) -> SampleGroup:
        if self._position == len(self.dataset):
            self._enter(epoch=self._epoch + 1, position=0)
        row = self.dataset[int(self._order[self._position])]
        group = self._group(row, self._epoch, self._group_index, self._index, self._samples_per_group)
        self._position += 1
        self._group_index += 1
        self._index += self._samples_per_group
        return group

    def _group(self, row: PromptRow, epoch: int, group_index: int, index: int, count: int) -> SampleGroup:
        uid = GroupUid(self.source_hash, row.row, epoch)
        return make_group(row, uid, num_samples=count, group_index=group_index, index=index)


class EvalSource:
    """The evaluation sets (``--eval-prompt-data NAME=PATH …``), each read once and handed out in file order.

    args: the flat options; ``DataOptions`` and ``EvalOptions`` are read. Raises ConfigError and DataError.
    """

    def __init__(self, args: Any) -> None:
        options: _EvalArgs = args
        keys = RowKeys.from_args(args)
        self._samples_per_group = options.n_samples_per_eval_prompt
        self.datasets: dict[str, PromptDataset] = {
            eval_set.name: read_dataset(eval_set.path, keys) for eval_set in parse_eval_sets(options.eval_prompt_data)
        }

    @property
    def names(self) -> list[str]:
        """The sets' names in the order of the option."""
        return list(self.datasets)

    def groups(self, name: str) -> list[SampleGroup]:
        """Fresh groups of one set in file order: ``data_set`` is its name, the epoch 0."""
        dataset = self.datasets[name]
        return [
            make_group(
                row,
                # The name keeps two sets apart that read the same rows of one file.
                GroupUid(f"{name}@{dataset.source_hash}", row.row, 0),
                num_samples=self._samples_per_group,
                group_index=row.row,
                index=row.row * self._samples_per_group,
                data_set=name,
            )
            for row in dataset
        ]

    def all_groups(self) -> list[SampleGroup]:
        """Fresh groups of every set, one set after another."""
        return [group for name in self.datasets for group in self.groups(name)]


def make_group(
    row: PromptRow, uid: GroupUid, *, num_samples: int, group_index: int, index: int, data_set: str = ""
) -> SampleGroup:
    """A group of empty samples for one row. Samples share nothing that can be changed.

    group_index: running number of the group; index: running number of its first sample.
    """
    samples = [
        Sample(
            uid=uid,
            sample_index=number,
            group_index=group_index,
            index=index + number,
            prompt=copy.deepcopy(row.prompt),
            label=copy.deepcopy(row.label),
            metadata=copy.deepcopy(row.metadata),
        )
        for number in range(num_samples)
    ]
    return SampleGroup(uid=uid, samples=samples, data_set=data_set)


def _count(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"the saved {name} is {value!r}", expected="a count from 0")
    return value
