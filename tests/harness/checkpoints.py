"""Checkpoints of a content of the test's own, and the weights that a run ended with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from buffer_rl.files.checkpoint import new_checkpoint


def nothing(_folder: Path) -> None:
    """Fills a checkpoint with no file."""


def write_checkpoint(
    root: str | Path,
    step: int,
    fill: Callable[[Path], None] = nothing,
    facts: Mapping[str, Any] | None = None,
    scratch: Path | None = None,
) -> Path:
    """The folder of a checkpoint that ``fill`` filled."""
    with new_checkpoint(root, step, facts or {}, scratch) as folder:
        fill(folder)
    return Path(root) / f"step_{step:06d}"


def final_weights(run_dir: Path) -> dict[str, str]:
    """A digest of each tensor that the run ended with. Whole tensors that differ take pytest minutes to show."""
    tensors = load_file(run_dir / "hf" / "model.safetensors")
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in tensors.items()}
