"""The model of one process of a role, and the versions of its weights: from folders, or from the trainer's broadcasts.

Who waits for whom: ``join`` and ``receive`` wait for the trainer's source rank and the role's other processes, each
with a deadline. A process that fails leaves the group, so the others do not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from buffer_rl.args import Args
from buffer_rl.errors import EngineError, TrainError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Topology
from buffer_rl.trainer.model import ModelFactory
from buffer_rl.trainer.pretrained import initial_folder, pick_device
from buffer_rl.weights.disk import DiskSender
from buffer_rl.weights.distributed import JOIN_TIMEOUT_S
from buffer_rl.weights.process_group import WeightGroup, join

FLAG = "--weight-sync-mode"
"""What is named where received weights do not load."""


class RoleModel:
    """The model of ``role`` in process ``index``, frozen, at first with its initial weights, as version ``"0"``.

    version: empty from the first bucket of a version until its last: the model is of no version then.
    """

    def __init__(self, args: Args, registry: PluginRegistry, role: str, index: int) -> None:
        self._args = args
        self._rank = 1 + index
        self.device = pick_device(args.train_device)
        self._models = ModelFactory(args, registry, self.device)
        self._group: WeightGroup | None = None
        self._own: dict[str, torch.Tensor] | None = None
        self._arrived: dict[str, torch.Tensor] = {}
        self.load(*initial_folder(args, role), "0")

    def load(self, path: str | None, flag: str, version: str) -> None:
        """Take the weights in the folder ``path``, which ``flag`` names."""
        self.model = self._models.build(path, flag, frozen=True)
        self.version = version

    def join(self, address: str, port: int, name: str, world_size: int) -> None:
        """Join the group ``name`` of the sender at ``address:port``, in place of the group before. Raises EngineError
        if not all are there within ``JOIN_TIMEOUT_S``."""
        self.leave()
        self._arrived = {}
        self._own = self.model.own_weights()
        rank, limit = self._rank, JOIN_TIMEOUT_S
        self._group = join(address, port, name=name, rank=rank, world_size=world_size, timeout_s=limit)

    def receive(self, bucket: Mapping[str, Sequence[Any]], version: str | None) -> None:
        """Receive a bucket: ``names``, ``dtypes`` and ``shapes``. version: of the weights, with the last bucket.

        They are copied into the model's memory. Where a folder has them in another form (a converter, fused experts),
        they are kept to the end, and loaded by way of a folder of this process.
        Raises EngineError if they do not arrive within ``--update-weights-timeout-s``, TrainError if a tensor does not
        fit, or is missing at the end."""
        self.version = ""
        if self._group is None:
            raise EngineError("this process is in no weight group", where=f"rank {self._rank}")
        dtypes = [getattr(torch, dtype) for dtype in bucket["dtypes"]]
        expected = list(zip(dtypes, map(torch.Size, bucket["shapes"]), strict=True))
        try:
            tensors = self._group.receive(expected, self._args.update_weights_timeout_s)
        except EngineError:
            self.leave()
            raise
        self._take(dict(zip(bucket["names"], tensors, strict=True)))
        if version is not None:
            self._finish(version)

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._own is None:
            self._arrived.update(tensors)
            return
        for name, tensor in tensors.items():
            own = self._own.get(name)
            if own is None:  # a folder may have more than its model
                continue
            if own.shape != tensor.shape:
                shapes = f"{list(tensor.shape)} (expected: {list(own.shape)})"
                raise TrainError(f"the weights {name} have the shape {shapes}", where=FLAG)
            own.copy_(tensor)
            self._arrived[name] = own

    def _finish(self, version: str) -> None:
        arrived, self._arrived = self._arrived, {}
        if self._own is None:
            with TemporaryDirectory(prefix="buffer_rl_") as folder:
                path = str(Path(folder, "weights"))
                DiskSender(self._args, Topology(dp_rank=0, dp_size=1)).write(iter([arrived]), path)
                self.load(path, FLAG, version)
            return
        written = {tensor.data_ptr() for tensor in arrived.values()}  # of tied weights, one may come
        missing = [name for name, own in self._own.items() if own.data_ptr() not in written]
        if missing:
            raise TrainError(f"{len(missing)} weights did not arrive, such as {missing[0]}", where=FLAG)
        self.version = version
