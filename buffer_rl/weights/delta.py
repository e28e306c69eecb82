"""What changed between two versions of the weights, and digests of whole versions: ``--publish-delta``.

A delta has three forms of a tensor, under names of a bucket: nothing if no bit of it changed; ``NAME:gaps`` and
``NAME:values``, the flat positions of the elements that changed and their new values; ``NAME``, the whole tensor, if
that is no larger. A position is given by how many elements lie between it and the one before, in 8 bits, or in 16 where
few elements changed: every 256th or 65,536th element is listed, so that no gap is wider. Values are copied, never
computed with, so a delta is exact.

A digest is of all tensors: names, number formats, shapes and bytes. It finds faults, not attacks. Who applies a delta
compares the digest of the result with that of the sender's weights, so a fault of the base, of the delta or of their
order is found wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from buffer_rl.errors import EngineError
from buffer_rl.weights.process_group import described
from buffer_rl.weights.shared_memory import as_bytes, bytes_view

NARROW, WIDE = np.uint8, np.uint16
FEW = 85
"""Fewer than one element in so many: 2 bytes a gap are less than 1 and, for each 256th element, 3 more."""
GAPS, VALUES = ":gaps", ":values"
"""Endings of the names of a part; no name of a weight has a colon."""
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Tensors = Mapping[str, torch.Tensor]


def encode(name: str, before: torch.Tensor | None, after: torch.Tensor) -> dict[str, torch.Tensor]:
    """What makes ``after`` of ``before``, which has its shape and number format, in the smallest of the three forms;
    None: it is unknown. Both contiguous, on the CPU."""
    if before is None:
        return {name: after}
    new = _bits(after)
    changed = _bits(before) != new
    if not (num_changed := int(np.count_nonzero(changed))):
        return {}
    width: Any = WIDE if num_changed * FEW < after.numel() else NARROW
    span = int(np.iinfo(width).max) + 1
    changed[span - 1 :: span] = True
    at = np.flatnonzero(changed)
    if len(at) * (width().itemsize + after.element_size()) >= after.nbytes:
        return {name: after}
    gaps = (np.diff(at, prepend=-1) - 1).astype(width)
    gaps = gaps.view(np.int16) if width is WIDE else gaps  # which every form of a bucket knows
    return {f"{name}{GAPS}": torch.from_numpy(gaps), f"{name}{VALUES}": torch.from_numpy(new[at]).view(after.dtype)}


def _bits(tensor: torch.Tensor) -> Any:
    """The elements as unsigned integers, so that equal means the same bits: [num_elements], of the tensor's memory."""
    return as_bytes(tensor).numpy().view(_BITS[tensor.element_size()])


def apply(parts: Tensors, tensors: Tensors) -> dict[str, torch.Tensor | None]:
    """Make the tensors, which are changed in place, those of the delta ``parts``.

    Returns the flat positions that may have changed by name, int64; None: all of them. Raises EngineError, with some
    tensors changed, if the delta is of others."""
    changed: dict[str, torch.Tensor | None] = {}
    for part, value in parts.items():
        name = part.removesuffix(VALUES)
        if part.endswith(GAPS):
            continue
        target = tensors.get(name)
        gaps = parts.get(f"{name}{GAPS}") if name != part else None
        if target is None or value.dtype != target.dtype or (gaps is None and value.shape != target.shape):
            raise EngineError(f"the delta is of other weights: {part}", where="the delta")
        flat = target.view(-1)
        if gaps is None:
            target.copy_(value)
            changed[name] = None
            continue
        raw = gaps.numpy()
        at = np.cumsum((raw if raw.dtype == NARROW else raw.view(WIDE)).astype(np.int64) + 1) - 1
        if len(at) != value.numel() or (len(at) and at[-1] >= flat.numel()):
            raise EngineError(f"the delta has positions outside {name}", where="the delta")
        changed[name] = positions = torch.from_numpy(at)
        flat[positions] = value.view(-1)
    return changed


def tensor_digest(tensor: torch.Tensor) -> str:
    """128 bits of number format, shape and bytes, in hexadecimal."""
    digest = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(bytes_view(tensor))
    return digest.hexdigest()


def digest_of(digests: Mapping[str, str]) -> str:
    """Of a version whose tensors have these digests."""
    return xxhash.xxh3_128("".join(f"{name}={digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def weights_digest(tensors: Tensors) -> str:
    """Of a version."""
    return digest_of({name: tensor_digest(tensor) for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A version that a sender holds. base: digest of the version that its delta is of; None: there is no delta.

    delta_plan, full_plan: names, number formats and shapes of the buckets of each. delta_bytes, full_bytes: of all.
    """

    digest: str
    base: str | None
    delta_plan: list[dict[str, list[Any]]]
    full_plan: list[dict[str, list[Any]]]
    delta_bytes: int
    full_bytes: int

    def sent_share(self, *, as_delta: bool) -> float:
        """Which part of a whole version's bytes is sent."""
        return self.delta_bytes / self.full_bytes if as_delta else 1.0


class DeltaSource:
    """A sender's newest version and its delta of the one before, both on the CPU.

    cast: brings a tensor, by its name, to the number format in which it is sent.
    """

    def __init__(self, cast: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor) -> None:
        self._cast = cast
        self._digest: str | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._names: list[list[str]] = []
        self._delta: list[dict[str, torch.Tensor]] = []

    def advance(self, buckets: Iterable[Tensors]) -> Encoded:
        """Hold the version in ``buckets``. What is held is nothing's base if this fails."""
        base, self._digest = self._digest, None
        before, digests = set(self._tensors), dict[str, str]()
        self._names, self._delta = [], []
        for bucket in buckets:
            self._names.append(list(bucket))
            delta: dict[str, torch.Tensor] = {}
            for name, tensor in bucket.items():
                cast = self._cast(name, tensor.detach()).cpu().contiguous()
                held = self._tensors.get(name)
                if held is not None and (held.dtype, held.shape) != (cast.dtype, cast.shape):
                    held = None
                part = {} if base is None else encode(name, held, cast)
                digests[name] = tensor_digest(cast)
                self._tensors[name] = cast.clone() if held is None else held.copy_(cast)
                # A whole part is what is held: the trainer may gather the next bucket in the memory of this one.
                delta |= {own: self._tensors[name] if own == name else found for own, found in part.items()}
            self._delta += [delta] if delta else []
        base = base if before == digests.keys() else None
        self._tensors = {name: self._tensors[name] for name in digests}
        self._digest = digest_of(digests)
        full = list(self.buckets(as_delta=False))
        return Encoded(
            digest=self._digest,
            base=base,
            delta_plan=[described(bucket) for bucket in self._delta],
            full_plan=[described(bucket) for bucket in full],
            delta_bytes=_num_bytes(self._delta),
            full_bytes=_num_bytes(full),
        )

    def buckets(self, *, as_delta: bool) -> Iterator[dict[str, torch.Tensor]]:
        """The version that is held, or its delta; one that is a tensor of the version shares its memory."""
        if as_delta:
            yield from self._delta
        else:
            yield from ({name: self._tensors[name] for name in names} for names in self._names)


def _num_bytes(buckets: Iterable[Tensors]) -> int:
    return sum(tensor.nbytes for bucket in buckets for tensor in bucket.values())
