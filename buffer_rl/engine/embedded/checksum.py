"""Checksums of the weights that an engine serves, in the shape of SGLang's ``/weights_checker``.

They are of the tensors that the forward pass reads, which are prepared from the Hugging Face weights (see
``FastDecoder``) and named after where they are used. Equal weights give equal checksums in engines with the same
architecture, number format, device kind and decoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from buffer_rl.weights.shared_memory import bytes_view


def tensor_checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and the bytes in row-major order."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(bytes_view(tensor))
    return digest.hexdigest()


def checksum_answer(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """The answer of ``/weights_checker``: ``per_engine_checksum`` over all tensors, in order of their names."""
    checksums = {name: tensor_checksum(tensor) for name, tensor in named}
    digest = hashlib.sha256()
    for name in sorted(checksums):
        digest.update(f"{name}={checksums[name]}\n".encode())
    whole = digest.hexdigest()
    return {
        "success": True,
        "message": f"Checksums of {len(checksums)} tensors.",
        "per_engine_checksum": whole,
        "ranks": [{"checksums": checksums, "per_gpu_checksum": whole}],
    }
