"""Weights by disk: a versioned folder of safetensors that the engines read.

The folder gets its name by one rename, so that no engine ever reads half a version.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from buffer_rl.weights.options import WeightOptions

if TYPE_CHECKING:
    from buffer_rl.engine.control import EngineControlClient


class WeightSource(Protocol):
    """The newest weights of the trainer: as a Hugging Face folder, or shared with processes of rank 0's machine."""

    def save_hf(self, path: str) -> None: ...
    def share_weights(self, load_format: str | None, num_receivers: int) -> list[list[str]]: ...
    def release_weights(self) -> None: ...


class DiskTransport:
    """``--weight-sync-mode disk``."""

    def __init__(self, args: WeightOptions) -> None:
        self._folder = Path(args.run_dir).absolute() / "weights"  # type: ignore[attr-defined]  # of RunOptions

    def prepare(self, source: WeightSource, version: int) -> Any:
        """Write the version; engines go on generating meanwhile. Returns the folder."""
        target = self._folder / f"v{version:06d}"
        temporary = target.with_name(f".{target.name}.tmp")
        self._folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        source.save_hf(str(temporary))
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        return target

    def load(self, engines: EngineControlClient, prepared: Any, version: int) -> None:
        """Have the paused engines read the version."""
        engines.update_weights_from_disk(str(prepared), version)

    def cleanup(self, prepared: Any) -> None:
        """All engines have the version: forget the older ones."""
        for folder in (*self._folder.glob("v*"), *self._folder.glob(".v*.tmp")):  # the latter of a run that was killed
            if folder != prepared:
                shutil.rmtree(folder, ignore_errors=True)
