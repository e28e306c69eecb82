"""Checkpoints of a content of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
