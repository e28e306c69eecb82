"""Weights by tensor: the engines read the trainer's memory, and no file is written.

On one machine only. The trainer's rank that has the weights puts the buckets into shared memory while the engines still
generate; all engines read the same memory. An engine stages the buckets between ``/begin_weight_update`` and
``/end_weight_update`` and takes them all at once at the end, so what fails in between leaves it with the old weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError, EngineError
from buffer_rl.records.groups import Topology
from buffer_rl.weights.options import WeightOptions
from buffer_rl.weights.sender import Senders, drained

if TYPE_CHECKING:
    from buffer_rl.engines.control import EngineControlClient
    from buffer_rl.engines.protocol import ServerInfo

LOAD_FORMAT = "buffer_rl_shared_memory"
"""``load_format`` of the embedded engine: JSON handles (see ``buffer_rl.weights.shared_bucket``). Other engines get
SGLang's own form, a pickle, which is ``load_format`` null."""


class TensorSender:
    """Shares one rank's weights."""

    def __init__(self, args: Args, topology: Topology) -> None:
        from buffer_rl.weights.shared_bucket import SharedWeights

        self._is_source = topology.is_source
        self._shared = SharedWeights(use_cuda_ipc=args.engine_device != "cpu")

    def share(self, buckets: Iterator[Any], load_format: str | None, num_receivers: int) -> list[list[str]]:
        """Put the weights into shared memory: for every bucket a handle for each receiver. Nothing on a rank that has
        none of them."""
        if not self._is_source:
            drained(buckets)
            return []
        return self._shared.share(buckets, num_receivers, pickled=load_format is None)

    def handles(self, buckets: Iterator[Any], num_receivers: int) -> list[list[str]]:
        """Other handles of what is shared."""
        return self._shared.handles(num_receivers)

    def release(self, buckets: Iterator[Any]) -> None:
        """Free the memory that ``share`` took."""
        self._shared.release()


class TensorTransport:
    """``--weight-sync-mode tensor``."""

    sender = TensorSender
    staged = True

    def __init__(self, args: WeightOptions) -> None:
        self._buckets: list[list[str]] = []

    def connect(self, trainer: Senders, engines: EngineControlClient) -> None:
        """Ask the engines what they read: handles as JSON, or pickled, one for each of their ranks. What was prepared
        gets other handles: one that was read cannot be read again."""
        self._trainer, self._engines = trainer, engines
        found = engines.server_info()
        self._ranks = tensor_parallel_ranks(found)
        forms = {info.is_embedded for info in found.values()}
        if len(forms) != 1:
            what = "embedded engines and others cannot read the same memory"
            where = "--weight-sync-mode tensor and --engine-urls"
            raise ConfigError(what, where=where, expected="engines of one kind", hint="use --weight-sync-mode disk")
        self._load_format = LOAD_FORMAT if forms.pop() else None
        if self._buckets:
            answers = self._trainer.send(TensorSender.handles, sum(self._ranks.values()))
            self._buckets = [*chain.from_iterable(answers)]

    def prepare(self, version: int) -> None:
        """Put the version into shared memory; engines go on generating meanwhile."""
        answers = self._trainer.send(TensorSender.share, self._load_format, sum(self._ranks.values()))
        self._buckets = [*chain.from_iterable(answers)]
        if not self._buckets:
            raise EngineError("the trainer has no weights to share", where=f"publication of version {version}")

    def publish(self, version: int) -> None:
        """Have the paused engines read the version; it gets its number with the last bucket."""
        last = len(self._buckets) - 1
        for index, bucket in enumerate(self._buckets):
            handles = iter(bucket)
            own = {url: list(islice(handles, num_ranks)) for url, num_ranks in self._ranks.items()}
            self._engines.update_weights_from_tensor(own, self._load_format, version if index == last else None)

    def stage(self, version: int) -> None:
        """Have the engines read and prepare the version while they generate."""
        self._engines.begin_weight_update()
        self.publish(version)
        self._engines.prepare_weight_update()

    def swap(self, version: int) -> None:
        """Have the paused engines serve what they prepared."""
        self._engines.serve_prepared()

    def release(self, version: int) -> None:
        """All engines have the version: free the memory."""
        self.close()

    def close(self) -> None:
        """Free the memory."""
        if self._buckets:
            self._buckets = []
            self._trainer.send(TensorSender.release)


def tensor_parallel_ranks(engines: Mapping[str, ServerInfo]) -> dict[str, int]:
    """How many ranks each engine has, by URL. Raises ConfigError if one is several data-parallel engines: SGLang's
    take weights from disk only."""
    for url, info in engines.items():
        if info.dp_size != 1:
            what = f"an engine with dp_size {info.dp_size} takes weights from disk only"
            hint = "start engines of one replica each, or use --weight-sync-mode disk"
            raise ConfigError(what, where=url, expected="dp_size 1", hint=hint)
    return {url: info.tp_size for url, info in engines.items()}
