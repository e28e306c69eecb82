"""What data sources and conversions to training columns receive and return."""

from __future__ import annotations

from typing import Any, Protocol

from buffer_rl.kinds.kind import PluginKind
from buffer_rl.records.groups import Column, Sample, SampleGroup


class DataSource(Protocol):
    """Returns prompt groups in a reproducible order, and never ends. Constructed as ``cls(args)`` in a process of its
    own; see docs/plugins.md for what it may return. The groups may be lists of samples, and methods may be async.
    ``save`` writes one file, from which ``load`` of a new object goes on; it is called after each batch. With a
    parameter ``rollout_id`` it writes files below ``args.save``. Groups that are given back wait in the Buffer's queue.
    """

    def get_samples(self, num_samples: int) -> list[SampleGroup]: ...
    def save(self, path: str) -> None: ...
    def load(self, path: str) -> None: ...
    def __len__(self) -> int: ...


class SamplesToTrainData(Protocol):
    """Turns one group's samples into training columns (see ``TrainBatch.columns``), one row a sample."""

    def __call__(self, args: Any, samples: list[Sample]) -> dict[str, Column]: ...


KINDS = (
    PluginKind(
        name="data_source",
        flags=("--data-source-path",),
        protocol=DataSource,
        signature="class (args) with get_samples, save, load, __len__",
        may_be_async=True,
        constructed=("args",),
    ),
    PluginKind(
        name="samples_to_train_data",
        flags=("--custom-convert-samples-to-train-data-path",),
        protocol=SamplesToTrainData,
        signature="(args, samples) -> dict of columns",
    ),
)
