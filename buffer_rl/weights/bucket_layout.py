"""Named tensors in one run of bytes: where each of them lies, and how it is read back.

A layout crosses processes as JSON. What comes from outside is checked before a byte is read: a bad layout is an
EngineError, never a view outside the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from buffer_rl.errors import EngineError

ALIGNMENT = 64
"""Bytes; every tensor starts at a multiple, as torch's own allocator does, so that views of any dtype are aligned."""

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """One tensor of a bucket. offset: in bytes from the bucket's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        count = DTYPES[self.dtype].itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """The places of a bucket's tensors, in order, and its length in bytes."""

    places: tuple[TensorPlace, ...]
    num_bytes: int

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
                raise EngineError(
                    f"weights of dtype {place.dtype} cannot be published", where=name, expected=", ".join(DTYPES)
                )
            places.append(place)
            end = place.offset + place.num_bytes
        return cls(places=tuple(places), num_bytes=end)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; ``parse`` is the inverse."""
        tensors = [[place.name, place.dtype, list(place.shape), place.offset] for place in self.places]
        return {"num_bytes": self.num_bytes, "tensors": tensors}

    @classmethod
    def parse(cls, raw: Any) -> BucketLayout:
        """Raises EngineError unless ``raw`` is a layout whose tensors all lie within its bytes."""
        try:
            num_bytes, rows = raw["num_bytes"], raw["tensors"]
            places = tuple(
                TensorPlace(name=name, dtype=dtype, shape=tuple(shape), offset=offset)
                for name, dtype, shape, offset in rows
            )
            sound = _is_size(num_bytes) and all(_is_sound(place, num_bytes) for place in places)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"not a bucket of weights: {type(error).__name__}: {error}") from error
        if not sound or len({place.name for place in places}) != len(places):
            raise EngineError("not a bucket of weights: a tensor lies outside it, is named twice or has no known dtype")
        return cls(places=places, num_bytes=num_bytes)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in ``flat``, uint8 of at least ``num_bytes``; they share its memory."""
        return {
            place.name: flat[place.offset : place.offset + place.num_bytes].view(DTYPES[place.dtype]).view(place.shape)
            for place in self.places
        }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` in row-major order, ``[num_bytes]`` uint8; shares memory where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of ``tensor`` in row-major order, on the CPU."""
    array: Any = as_bytes(tensor.cpu()).numpy()
    return memoryview(array)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_sound(place: TensorPlace, num_bytes: int) -> bool:
    return (
        isinstance(place.name, str)
        and bool(place.name)
        and isinstance(place.dtype, str)
        and place.dtype in DTYPES
        and all(_is_size(size) for size in place.shape)
        and _is_size(place.offset)
        and place.offset % ALIGNMENT == 0
        and place.offset + place.num_bytes <= num_bytes
    )
