"""The weight update that an engine is in: what has arrived of a version, and what is ready to be served of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from buffer_rl.embedded.loader import Replacement
from buffer_rl.errors import EngineError
from buffer_rl.weights.shared_bucket import open_bucket
from buffer_rl.weights.tensor import LOAD_FORMAT

_NOT_BEGUN = "no weight update is under way"


class StagedUpdate:
    """The tensors of the version that is arriving, if one is. They are views of the sender's shared memory, or copies
    on its device, so that the engine's memory holds them once. prepared: what serves the whole version, once it is
    prepared, with all tensors in it."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] | None = None
        self._version: str | None = None
        self._flush = False
        self._is_sealed = False
        self.base: str | None = None
        self.prepared: Replacement | None = None

    def begin(self, selector: Any = "all", base: str | None = None) -> None:
        """Start an update, of all weights or, with ``base``, of a delta; one that was left unfinished is forgotten.
        Raises EngineError for another selector."""
        if selector != "all":
            raise EngineError(f"selector {selector!r} is not supported", expected='"all"')
        self.discard()
        self._tensors, self.base = {}, base

    def add(self, serialized: Any, load_format: Any, version: str | None, *, flush_cache: bool) -> None:
        """Stage one bucket. serialized: a list with one handle (see ``buffer_rl.weights.shared_bucket``).

        Raises EngineError, and the update is over, if no update was begun, if the bucket is in another form (pickles
        are not read), cannot be opened, or names a tensor again.
        """
        try:
            tensors = _opened(serialized, load_format)
            self.require(tensors)
        except EngineError:
            self.discard()
            raise
        self.stage(tensors, version, flush_cache=flush_cache)

    def require(self, names: Iterable[str]) -> object:
        """The update under way; another one is another object. Raises EngineError if there is none, or if it has one
        of the weights ``names`` already."""
        if self._tensors is None or self._is_sealed:
            raise EngineError(_NOT_BEGUN, hint="call /begin_weight_update first")
        twice = next((name for name in names if name in self._tensors), None)
        if twice is not None:
            raise EngineError(f"the weights {twice} came twice in one update")
        return self._tensors

    def stage(self, tensors: Mapping[str, torch.Tensor], version: str | None, *, flush_cache: bool) -> None:
        """Stage what ``require`` has allowed. version: the name of the weights, where this part says it."""
        assert self._tensors is not None
        self._tensors.update(tensors)
        self._version = self._version if version is None else version
        self._flush = self._flush or flush_cache

    def seal(self, version: str | None) -> dict[str, torch.Tensor]:
        """All tensors, which are the update under way as ``require`` returns it: none comes any more. version: as in
        ``stage``. Raises EngineError if no update was begun."""
        self.require(())
        self.stage({}, version, flush_cache=False)
        assert self._tensors is not None
        self._is_sealed = True
        return self._tensors

    def is_sealed(self, update: object) -> bool:
        """Whether ``update`` is still the one under way."""
        return self._is_sealed and self._tensors is update

    def finish(self) -> tuple[dict[str, torch.Tensor], str | None, bool]:
        """All tensors, the version's name if one was given, and whether to flush; nothing is staged then. Raises
        EngineError if no update was begun."""
        if self._tensors is None or (self._is_sealed and self.prepared is None):
            raise EngineError(_NOT_BEGUN, hint="/begin_weight_update comes first, and a refused part ends an update")
        taken = (self._tensors, self._version, self._flush)
        self.discard()
        return taken

    def discard(self) -> None:
        """Forget what is staged."""
        self._tensors, self._version, self._flush, self.base = None, None, False, None
        self._is_sealed, self.prepared = False, None


def _opened(serialized: Any, load_format: Any) -> dict[str, torch.Tensor]:
    if load_format != LOAD_FORMAT:
        what = f"load_format {load_format!r} is not supported: the embedded engine unpickles nothing"
        raise EngineError(what, expected=f"{LOAD_FORMAT!r}, with JSON handles of shared memory")
    if not isinstance(serialized, list) or len(serialized) != 1 or not isinstance(serialized[0], str):
        raise EngineError("'serialized_named_tensors' must be a list of one string", hint="the engine is one rank")
    return open_bucket(serialized[0])
