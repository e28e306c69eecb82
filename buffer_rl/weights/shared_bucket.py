"""A version's buckets in memory that other processes read, and the handles that name it.

A handle is JSON: the layout of the tensors and where the bytes are. It goes to the embedded engine in place of
SGLang's pickled tensors, because an engine must not unpickle what it receives: a pickle is a program. SGLang's own
form, for servers that know no other, is in ``buffer_rl.weights.sglang_wire``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from buffer_rl.errors import EngineError
from buffer_rl.weights import cuda_ipc
from buffer_rl.weights.bucket_layout import BucketLayout, as_bytes
from buffer_rl.weights.sglang_wire import SharedTensors
from buffer_rl.weights.shared_memory import SharedMemory, open_memory


class SharedWeights:
    """What one process shares of one version. ``release`` gives it up; a process that ends has released it too.

    cuda_ipc: tensors that are on a CUDA device stay there; else they go through the machine's own memory.
    """

    def __init__(self, *, use_cuda_ipc: bool = False) -> None:
        self._use_cuda_ipc = use_cuda_ipc
        self._held: list[SharedMemory | SharedTensors | torch.Tensor] = []

    def share(self, buckets: Iterable[Mapping[str, torch.Tensor]], num_receivers: int = 1) -> list[list[str]]:
        """For every bucket a handle for each receiver. What was shared before is released first; if a bucket cannot
        be shared, the others are released."""
        return self._share_all(buckets, self._share_one, num_receivers)

    def share_pickled(self, buckets: Iterable[Mapping[str, torch.Tensor]], num_receivers: int = 1) -> list[list[str]]:
        """``share`` in the form that SGLang reads."""
        return self._share_all(buckets, self._pickle_one, num_receivers)

    def release(self) -> None:
        """Give up everything. May be called twice."""
        held, self._held = self._held, []
        for item in held:
            if not isinstance(item, torch.Tensor):
                item.close()

    def _share_all(
        self,
        buckets: Iterable[Mapping[str, torch.Tensor]],
        share: Callable[[Mapping[str, torch.Tensor], int], list[str]],
        num_receivers: int,
    ) -> list[list[str]]:
        self.release()
        try:
            return [share(bucket, num_receivers) for bucket in buckets]
        except BaseException:
            self.release()
            raise

    def _share_one(self, bucket: Mapping[str, torch.Tensor], num_receivers: int) -> list[str]:
        layout = BucketLayout.of(bucket)
        devices = {tensor.device for tensor in bucket.values()}
        if self._use_cuda_ipc and len(devices) == 1 and next(iter(devices)).type == "cuda":
            flat = torch.empty(layout.num_bytes, dtype=torch.uint8, device=next(iter(devices)))
            for place, tensor in zip(layout.places, bucket.values(), strict=True):
                flat[place.offset : place.offset + place.num_bytes].copy_(as_bytes(tensor))
            self._held.append(flat)
            return [_text("cuda_ipc", cuda_ipc.share(flat), layout) for _ in range(num_receivers)]
        memory = SharedMemory(layout.num_bytes)
        self._held.append(memory)
        for place, tensor in zip(layout.places, bucket.values(), strict=True):
            memory.write(tensor, place.offset)
        return [_text("memory", memory.seal(), layout)] * num_receivers

    def _pickle_one(self, bucket: Mapping[str, torch.Tensor], num_receivers: int) -> list[str]:
        tensors = SharedTensors(bucket)
        self._held.append(tensors)
        return [tensors.pickled() for _ in range(num_receivers)]


def open_bucket(text: str) -> dict[str, torch.Tensor]:
    """The tensors behind a handle, under their names: mapped from the machine's memory, or copied on their device.

    They stay valid when the owner releases them. Raises EngineError if the handle is not one, or cannot be opened.
    """
    try:
        handle = json.loads(text)
        kind, where, layout = handle["kind"], handle["where"], handle["layout"]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError("not a handle of a bucket of weights", expected="JSON with kind, where, layout") from error
    checked = BucketLayout.parse(layout)
    if kind == "memory":
        return checked.views(open_memory(where, checked.num_bytes))
    if kind == "cuda_ipc":
        return checked.views(cuda_ipc.copy_from(where, checked.num_bytes))
    raise EngineError(f"unknown kind of shared weights {kind!r}", expected="memory or cuda_ipc")


def _text(kind: str, where: dict[str, Any], layout: BucketLayout) -> str:
    return json.dumps({"kind": kind, "where": where, "layout": layout.to_json()})
