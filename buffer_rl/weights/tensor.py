"""Weights by tensor: the engines read the trainer's memory, and no file is written.

On one machine only. Rank 0 puts the buckets into shared memory while the engines still generate; all engines read the
same memory. An engine stages the buckets between ``/begin_weight_update`` and ``/end_weight_update`` and takes them
all at once at the end, so what fails in between leaves it with the old weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from buffer_rl.errors import EngineError
from buffer_rl.weights.options import WeightOptions

LOAD_FORMAT = "buffer_rl_shared_memory"
"""``load_format`` of the embedded engine: JSON handles (see ``buffer_rl.weights.shared_bucket``). Other engines get
SGLang's own form, a pickle, which is ``load_format`` null."""


class TensorSource(Protocol):
    """Shares the newest weights with other processes of this machine; the group of trainer ranks is one."""

    def share_weights(self, load_format: str | None, num_receivers: int) -> list[list[str]]: ...
    def release_weights(self) -> None: ...


class TensorEngineControl(Protocol):
    """The control calls to all engines together. Each raises EngineError, naming the engine, if one fails."""

    def begin_weight_update(self) -> None: ...
    def update_weights_from_tensor(
        self, serialized: Sequence[str], load_format: str | None, version: int | None
    ) -> None: ...
    def end_weight_update(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SharedVersion:
    """A version in shared memory: of every bucket a handle for each engine, and who owns the memory."""

    source: TensorSource
    buckets: list[list[str]]


class TensorTransport:
    """``--weight-sync-mode tensor``."""

    def __init__(self, args: WeightOptions) -> None:
        options: Any = args
        self._load_format = LOAD_FORMAT if options.rollout_engine == "embedded" else None
        # Of a fleet of the run's own it is the most that there are at any time: some may have died.
        self._num_engines = len(options.engine_urls) or options.rollout_num_engines

    def prepare(self, source: TensorSource, version: int) -> SharedVersion:
        """Put the version into shared memory; engines go on generating meanwhile."""
        buckets = source.share_weights(self._load_format, self._num_engines)
        if not buckets:
            raise EngineError("the trainer has no weights to share", where=f"publication of version {version}")
        return SharedVersion(source, buckets)

    def load(self, engines: TensorEngineControl, prepared: SharedVersion, version: int) -> None:
        """Have the paused engines read the version; it gets its number with the last bucket."""
        engines.begin_weight_update()
        last = len(prepared.buckets) - 1
        for index, handles in enumerate(prepared.buckets):
            engines.update_weights_from_tensor(handles, self._load_format, version if index == last else None)
        engines.end_weight_update()

    def cleanup(self, prepared: SharedVersion) -> None:
        """All engines have the version: free the memory."""
        prepared.source.release_weights()

    def discard(self, prepared: SharedVersion) -> None:
        """The publication failed: free the memory."""
        prepared.source.release_weights()
