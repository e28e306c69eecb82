"""A version's buckets of named tensors in memory that other processes read, and the handles that name them.

A handle is JSON: the layout of the tensors and where the bytes are. It goes to the embedded engine in place of
SGLang's pickled tensors, because an engine must not unpickle what it receives: a pickle is a program. A layout that
comes from outside is checked before a byte is read: a bad one is an EngineError, never a view outside the memory.

Servers that know no other form get SGLang's own (``/update_weights_from_tensor`` with ``load_format`` null): a pickle
of ``[(name, tensor), …]`` in base64, whose tensors are handles of shared memory. It is only written here, never read.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]  # of the standard library
import base64
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from typing import Annotated, Any, NamedTuple

import torch
import torch.multiprocessing as torch_multiprocessing
from pydantic import BaseModel, Field, ValidationError

from buffer_rl.errors import EngineError
from buffer_rl.weights.shared_memory import SharedMemory, as_bytes, copy_cuda_memory, open_memory, share_cuda_memory

ALIGNMENT = 64
"""Bytes; every tensor starts at a multiple, as torch's own allocator does, so that views of any dtype are aligned."""

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}


Size = Annotated[int, Field(strict=True, ge=0)]


class TensorPlace(NamedTuple):
    """One tensor of a bucket. offset: in bytes from the bucket's start."""

    name: Annotated[str, Field(min_length=1)]
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    shape: tuple[Size, ...]
    offset: Annotated[Size, Field(multiple_of=ALIGNMENT)]

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


class BucketLayout(BaseModel):
    """The places of a bucket's tensors, in order, and its length in bytes."""

    num_bytes: Size
    tensors: tuple[TensorPlace, ...]

    @classmethod
    def of(cls, bucket: Mapping[str, torch.Tensor]) -> BucketLayout:
        """The layout of ``bucket``'s tensors, one behind the other."""
        places, end = [], 0
        for name, tensor in bucket.items():
            place = TensorPlace(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset=-(-end // ALIGNMENT) * ALIGNMENT,
            )
            if place.dtype not in DTYPES:
                what = f"weights of dtype {place.dtype} cannot be published"
                raise EngineError(what, where=name, expected=", ".join(DTYPES))
            places.append(place)
            end = place.offset + place.num_bytes
        return cls.model_construct(tensors=tuple(places), num_bytes=end)

    @classmethod
    def parse(cls, raw: Any) -> BucketLayout:
        """The inverse of ``model_dump``. Raises EngineError unless ``raw`` is a layout whose tensors all lie within its
        bytes."""
        try:
            layout = cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise EngineError(f"not a bucket of weights: {first['msg']}", where=where) from error
        ends = {place.name: place.offset + place.num_bytes for place in layout.tensors}
        if len(ends) < len(layout.tensors) or max(ends.values(), default=0) > layout.num_bytes:
            raise EngineError("not a bucket of weights: a tensor lies outside it, or is named twice")
        return layout

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in ``flat``, uint8 of at least ``num_bytes``; they share its memory."""
        return {
            place.name: flat[place.offset : place.offset + place.num_bytes].view(DTYPES[place.dtype]).view(place.shape)
            for place in self.tensors
        }


class SharedTensors:
    """A bucket whose CPU tensors are copied into torch's shared memory; CUDA tensors are shared where they are.

    torch counts the handles that were not read, and would keep their files. ``close`` therefore takes the files' names
    away: what a receiver has mapped stays valid, and the last one that unmaps it frees it. If this process is killed
    before, torch's ``torch_shm_manager`` frees them.
    """

    def __init__(self, bucket: Mapping[str, torch.Tensor]) -> None:
        with _named_files():
            self._named = [(name, _shared(tensor)) for name, tensor in bucket.items()]

    def handle(self) -> str:
        """The bucket, pickled for one receiver: a server's tensor-parallel rank. Each handle can be read once."""
        buffer = io.BytesIO()
        dump: Any = ForkingPickler(buffer).dump
        with _named_files():
            dump(self._named)
        return base64.b64encode(buffer.getvalue()).decode()

    def close(self) -> None:
        """Give the tensors up. May be called twice."""
        named, self._named = self._named, []
        for _, tensor in named:
            if not tensor.is_cuda:
                _unlink(tensor)


def _shared(tensor: Any) -> torch.Tensor:
    copied: torch.Tensor = tensor.detach() if tensor.is_cuda else tensor.detach().clone().share_memory_()
    return copied


def _unlink(tensor: torch.Tensor) -> None:
    """Take away the name of the file that ``tensor`` is in."""
    storage: Any = tensor.untyped_storage()
    _, name, _ = storage._share_filename_cpu_()
    # torch removes the name when nothing refers to the file, and ends the process that finds it gone: never, then.
    storage._shared_incref()
    with suppress(FileNotFoundError):
        _posixshmem.shm_unlink(name.decode())


@contextmanager
def _named_files() -> Iterator[None]:
    """torch's default passes file descriptors over a socket of the sender, which a server that is no child of its
    cannot read and dies of; named files can be opened by any process of the user."""
    module: Any = torch_multiprocessing
    before = module.get_sharing_strategy()
    module.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        module.set_sharing_strategy(before)


class _SharedMemoryBucket:
    """A bucket in an anonymous memory file, sealed; its one handle can be read any number of times."""

    def __init__(self, bucket: Mapping[str, torch.Tensor]) -> None:
        layout = BucketLayout.of(bucket)
        self._memory = SharedMemory(layout.num_bytes)
        try:
            for place, tensor in zip(layout.tensors, bucket.values(), strict=True):
                self._memory.write(tensor, place.offset)
            self._handle = _text("memory", self._memory.seal(), layout)
        except BaseException:
            self.close()
            raise

    def handle(self) -> str:
        return self._handle

    def close(self) -> None:
        self._memory.close()


class _DeviceBucket:
    """A bucket in memory of the CUDA device that its tensors are on."""

    def __init__(self, bucket: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._layout = BucketLayout.of(bucket)
        self._flat = torch.empty(self._layout.num_bytes, dtype=torch.uint8, device=device)
        for place, tensor in zip(self._layout.tensors, bucket.values(), strict=True):
            self._flat[place.offset : place.offset + place.num_bytes].copy_(as_bytes(tensor))

    def handle(self) -> str:
        return _text("cuda_ipc", share_cuda_memory(self._flat), self._layout)

    def close(self) -> None:
        del self._flat


class SharedWeights:
    """What one process shares of one version. ``release`` gives it up; a process that ends has released it too.

    use_cuda_ipc: tensors that are on a CUDA device stay there; else they go through the machine's own memory.
    """

    def __init__(self, *, use_cuda_ipc: bool = False) -> None:
        self._use_cuda_ipc = use_cuda_ipc
        self._held: list[SharedTensors | _SharedMemoryBucket | _DeviceBucket] = []

    def share(
        self, buckets: Iterable[Mapping[str, torch.Tensor]], num_receivers: int = 1, *, pickled: bool = False
    ) -> list[list[str]]:
        """For every bucket a handle for each receiver; pickled: in the form that SGLang reads. What was shared before
        is released first; if a bucket cannot be shared, the others are released."""
        self.release()
        try:
            for bucket in buckets:
                self._held.append(SharedTensors(bucket) if pickled else self._shared(bucket))
            return self.handles(num_receivers)
        except BaseException:
            self.release()
            raise

    def handles(self, num_receivers: int) -> list[list[str]]:
        """More handles of what is shared: for every bucket one for each receiver."""
        return [[held.handle() for _ in range(num_receivers)] for held in self._held]

    def release(self) -> None:
        """Give up everything. May be called twice."""
        held, self._held = self._held, []
        for item in held:
            item.close()

    def _shared(self, bucket: Mapping[str, torch.Tensor]) -> _SharedMemoryBucket | _DeviceBucket:
        devices = {tensor.device for tensor in bucket.values()}
        if self._use_cuda_ipc and len(devices) == 1 and (device := next(iter(devices))).type == "cuda":
            return _DeviceBucket(bucket, device)
        return _SharedMemoryBucket(bucket)


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
        return checked.views(copy_cuda_memory(where, checked.num_bytes))
    raise EngineError(f"unknown kind of shared weights {kind!r}", expected="memory or cuda_ipc")


def _text(kind: str, where: dict[str, Any], layout: BucketLayout) -> str:
    return json.dumps({"kind": kind, "where": where, "layout": layout.model_dump()})
