"""Weights by disk: a versioned folder of safetensors that the engines read.

The folder gets its name by one rename, so that no engine ever reads half a version.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

from buffer_rl.weights.options import WeightOptions


class WeightSource(Protocol):
    """Writes the newest weights as a Hugging Face folder; the group of trainer ranks is one."""

    def save_hf(self, path: str) -> None: ...


class EngineControl(Protocol):
    """The control calls to all engines together. Each raises EngineError, naming the engine, if one fails."""

    def pause(self, mode: str) -> None: ...
    def flush(self) -> None: ...
    def update_weights_from_disk(self, path: str, version: int) -> None: ...
    def versions(self) -> dict[str, str]: ...
    def checksums(self) -> dict[str, str]: ...
    def resume(self) -> None: ...
    def drop_failed_engines(self) -> None: ...


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

    def load(self, engines: EngineControl, prepared: Any, version: int) -> None:
        """Have the paused engines read the version."""
        engines.update_weights_from_disk(str(prepared), version)

    def cleanup(self, prepared: Any) -> None:
        """All engines have the version: forget the older ones."""
        for folder in (*self._folder.glob("v*"), *self._folder.glob(".v*.tmp")):  # the latter of a run that was killed
            if folder != prepared:
                shutil.rmtree(folder, ignore_errors=True)
