"""Weight updates as a SGLang server makes them, for ``--imitate sglang``: each part is served as soon as it arrives.

Measured on SGLang 0.5.23. A session stays open until ``/end_weight_update``: a second begin is refused, also after a
refused part and after ``/continue_generation``. The version changes with the first part that names one. Unknown names
are ignored and wrong shapes answered with success; SGLang then serves garbage, this engine the old values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from buffer_rl.embedded.loader import LoadedModel, StagedUpdate, read_tensors
from buffer_rl.errors import EngineError


class SessionUpdate(StagedUpdate):
    """A session, in which ``taken`` gives what has arrived since the last call."""

    def begin(self, selector: Any = "all") -> None:
        """Open the session. Raises EngineError if it is open."""
        if self._tensors is not None:
            raise EngineError("a weight-update session is already open; call end_weight_update() first")
        super().begin(selector)

    def discard(self) -> None:
        """Forget what has arrived and is not served yet; the session stays open."""
        if self._tensors is not None:
            self.taken()

    def finish(self) -> tuple[dict[str, torch.Tensor], str | None, bool]:
        """Close the session; all that has arrived is served already. Raises EngineError if it is not open."""
        taken = super().finish()
        self._tensors = None
        return taken

    def taken(self) -> tuple[dict[str, torch.Tensor], str | None, bool]:
        """The tensors that arrived, the version's name if one was given, and whether to flush."""
        taken = (self._tensors or {}, self._version, self._flush)
        self._tensors, self._version, self._flush = {}, None, False
        return taken


class PartialWeights:
    """The weights that ``model`` serves, any of which can be replaced alone."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._served = read_tensors(Path(model.options.model_path))

    def replace_weights(self, path: str) -> None:
        """Take what fits of the weights in the folder ``path``. Raises EngineError if it has none."""
        if not (tensors := read_tensors(Path(path))):
            raise EngineError("no weights can be read", where=path)
        self.replace_tensors(tensors)

    def replace_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors whose name and shape are those of a weight; the others stay as they are."""
        fits = {name: tensor for name, tensor in tensors.items() if self._shape(name) == tensor.shape}
        self._served = self._served | {name: tensor.clone() for name, tensor in fits.items()}
        self._model.replace_tensors(self._served)

    def _shape(self, name: str) -> torch.Size | None:
        return self._served[name].shape if name in self._served else None
