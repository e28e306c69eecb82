"""The newest version as it was published, under the names of a checkpoint: what a delta is of.

Kept beside what the forward pass reads, which is rounded from it, in the memory of the machine. It is changed in place,
and has a digest only while it is a whole version: what fails in between leaves none, and the next version has to come
as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from buffer_rl.errors import EngineError
from buffer_rl.weights import delta
from buffer_rl.weights.disk import read_contents

Changes = Mapping[str, torch.Tensor | None]
"""Flat positions that may have changed by name, int64; None: all."""
MAX_STEPS = 1000


class KeptWeights:
    """digest: of the version that is kept; None: there is none."""

    digest: str | None = None

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        """Keep nothing."""
        self.digest, self.tensors = None, {}

    def take(self, tensors: Mapping[str, torch.Tensor], digest: str, base: str | None) -> Changes | None:
        """Keep the version of ``digest``: copies of all its tensors, or what a delta of ``base`` makes of the one that
        is kept. Returns what a delta changed. Raises EngineError, with nothing kept, if it is not that version then."""
        if base not in (None, self.digest):
            what = f"the delta is of the version {base}"
            raise EngineError(what, expected=str(self.digest or "a whole version"), hint="publish the whole version")
        changes: Changes | None = None
        self.digest = None
        try:
            if base is None:
                self.tensors = {}  # freed before the copies are made
                self.tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            else:
                changes = delta.apply(tensors, self.tensors)
            if (found := delta.weights_digest(self.tensors)) != digest:
                what = f"the weights that arrived have the digest {found}"
                raise EngineError(what, expected=digest, hint="publish the whole version")
        except BaseException:
            self.forget()
            raise
        self.digest = digest
        return changes


@dataclass(frozen=True, slots=True)
class Step:
    """A folder to read. base: digest of the version that it is a delta of; None: it is whole."""

    folder: Path
    digest: str
    base: str | None


def steps_to(folder: Path, kept: str | None) -> list[Step] | None:
    """What makes of the version ``kept`` that of a folder of ``--publish-delta``, in the order in which it is to be
    read; None if the folder is none. Raises EngineError if a folder is missing."""
    if (contents := read_contents(folder)) is None:
        return None
    steps: list[Step] = []
    while contents is not None and contents.digest != kept:
        if len(steps) == MAX_STEPS:
            raise EngineError(f"it builds on more than {MAX_STEPS} folders", where=str(folder))
        steps.insert(0, Step(folder, contents.digest, None if contents.base is None else contents.base[1]))
        if contents.base is None:
            return steps
        folder = folder.with_name(contents.base[0])
        if contents.base[1] == kept:
            return steps
        contents = read_contents(folder)
    if steps:
        raise EngineError("a folder that a delta builds on is missing", where=str(folder))
    return []
