"""A weight transport of your own: a folder a version, as ``--weight-sync-mode disk``, in half the bytes.

    buffer-rl train ... --weight-sync-mode ./examples/weight_transports/bfloat16_folder.py:BFloat16Folder

Driver and trainer each have a side. Here the driver's is that of the core's transport; the trainer's rounds what it
writes, so the engines sample from weights that are not quite those that are trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from buffer_rl.weights.disk import DiskSender, DiskTransport


class RoundingSender(DiskSender):
    """The trainer's side, one in each rank."""

    def write(self, buckets: Iterator[Mapping[str, Any]], folder: str) -> None:
        """Write the weights as bfloat16; all ranks iterate the buckets to their end, the source alone writes."""
        super().write(({name: tensor.bfloat16() for name, tensor in bucket.items()} for bucket in buckets), folder)


class BFloat16Folder(DiskTransport):
    """The driver's side."""

    sender = RoundingSender
