"""Weights that arrive in parts, between ``/begin_weight_update`` and ``/end_weight_update``.

Nothing of them is served before the end, which takes all or nothing. A part that is refused ends the update: the
next call has to be another begin.

Checksums of the weights that an engine serves have the shape of SGLang's ``/weights_checker``. They are of the tensors
that the forward pass reads, which are prepared from the Hugging Face weights (see ``FastDecoder``) and named after
where they are used. Equal weights give equal checksums in engines with the same architecture, number format, device
kind and decoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from buffer_rl.errors import EngineError
from buffer_rl.weights.shared_bucket import open_bucket
from buffer_rl.weights.shared_memory import bytes_view
from buffer_rl.weights.tensor import LOAD_FORMAT

_NOT_BEGUN = "no weight update is under way"


class StagedUpdate:
    """The tensors of the version that is arriving, if one is. They are views of the sender's shared memory, or copies
    on its device, so that the engine's memory holds them once."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] | None = None
        self._version: str | None = None
        self._flush = False

    def begin(self, selector: Any = "all") -> None:
        """Start an update; one that was left unfinished is forgotten. Raises EngineError unless all weights are to
        come."""
        if selector != "all":
            raise EngineError(f"selector {selector!r} is not supported", expected='"all"')
        self.discard()
        self._tensors = {}

    def add(self, serialized: Any, load_format: Any, version: str | None, *, flush_cache: bool) -> None:
        """Stage one bucket. serialized: a list with one handle (see ``buffer_rl.weights.shared_bucket``).

        Raises EngineError, and the update is over, if no update was begun, if the bucket is in another form (pickles
        are not read), cannot be opened, or names a tensor again.
        """
        try:
            for name, tensor in _opened(serialized, load_format).items():
                if self._tensors is None:
                    raise EngineError(_NOT_BEGUN, hint="call /begin_weight_update first")
                if name in self._tensors:
                    raise EngineError(f"the weights {name} came twice in one update")
                self._tensors[name] = tensor
        except EngineError:
            self.discard()
            raise
        self._version = self._version if version is None else version
        self._flush = self._flush or flush_cache

    def finish(self) -> tuple[dict[str, torch.Tensor], str | None, bool]:
        """All tensors, the version's name if one was given, and whether to flush; nothing is staged then. Raises
        EngineError if no update was begun."""
        if self._tensors is None:
            raise EngineError(_NOT_BEGUN, hint="/begin_weight_update comes first, and a refused part ends an update")
        taken = (self._tensors, self._version, self._flush)
        self.discard()
        return taken

    def discard(self) -> None:
        """Forget what is staged."""
        self._tensors, self._version, self._flush = None, None, False


def _opened(serialized: Any, load_format: Any) -> dict[str, torch.Tensor]:
    if load_format != LOAD_FORMAT:
        raise EngineError(
            f"load_format {load_format!r} is not supported: the embedded engine unpickles nothing",
            expected=f"{LOAD_FORMAT!r}, with JSON handles of shared memory",
        )
    if not isinstance(serialized, list) or len(serialized) != 1 or not isinstance(serialized[0], str):
        raise EngineError("'serialized_named_tensors' must be a list of one string", hint="the engine is one rank")
    return open_bucket(serialized[0])


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
