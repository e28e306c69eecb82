"""Named tensors in the form that an SGLang server reads: a pickle of ``[(name, tensor), …]`` in base64, whose tensors
are handles of shared memory (``/update_weights_from_tensor`` with ``load_format`` null).

Only written here, never read: the embedded engine takes no pickles.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing as torch_multiprocessing


class SharedTensors:
    """A bucket whose CPU tensors are copied into torch's shared memory; CUDA tensors are shared where they are.

    The memory is there until ``close`` and until every receiver has let go of it. torch counts: what a receiver was
    sent and never read stays until this process ends; if that is killed, torch's ``torch_shm_manager`` frees it.
    """

    def __init__(self, bucket: Mapping[str, torch.Tensor]) -> None:
        with _named_files():
            self._named = [(name, _shared(tensor)) for name, tensor in bucket.items()]

    def pickled(self) -> str:
        """The bucket for one receiver: a server's tensor-parallel rank."""
        buffer = io.BytesIO()
        dump: Any = ForkingPickler(buffer).dump
        with _named_files():
            dump(self._named)
        return base64.b64encode(buffer.getvalue()).decode()

    def close(self) -> None:
        """Give the tensors up."""
        self._named = []


def _shared(tensor: Any) -> torch.Tensor:
    copied: torch.Tensor = tensor.detach() if tensor.is_cuda else tensor.detach().clone().share_memory_()
    return copied


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
