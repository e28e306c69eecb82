"""Checkpoints: a folder a step, complete or absent, with a manifest of every file's size and hash.

A checkpoint is written into a temporary folder, every file is flushed to disk, and the folder gets its name by
one rename; so a folder named ``step_NNNNNN`` is whole, whatever happened while it was written. Opening one checks every
hash: a missing or damaged checkpoint is an error, never a fresh start.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from buffer_rl.errors import BufferRLError, CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
_STEP_NAME = re.compile(r"step_(\d{6,})")
_HASH_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint. ``facts`` is what the writer noted about the run."""

    folder: Path
    step: int
    facts: Mapping[str, Any]


def write_checkpoint(root: str | Path, step: int, fill: Callable[[Path], None], facts: Mapping[str, Any]) -> Path:
    """Write ``root/step_NNNNNN``. ``fill`` receives the temporary folder and writes files into it.

    A checkpoint of the same step is replaced only once the new one is whole. Raises whatever ``fill`` raises, and
    CheckpointError if the disk refuses; the temporary folder is then gone.
    """
    base = Path(root)
    target = base / f"step_{step:06d}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        _forget_unfinished(target)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=base))
    except OSError as error:
        raise CheckpointError(f"the checkpoint folder cannot be made: {error}", where=str(base)) from error
    try:
        fill(temporary)
        _seal(temporary, step, facts)
        _swap(temporary, target)
    except BufferRLError:  # a deadline of this library is an OSError too
        raise
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written: {error}", where=str(target)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at ``path``, or the newest one in the folder ``path``, with every hash checked.

    Raises CheckpointError naming the file that is missing or damaged.
    """
    chosen = Path(path)
    if not chosen.is_dir():
        raise CheckpointError("there is no such folder", where=f"--load {path}")
    if not (chosen / MANIFEST).exists():
        chosen = _newest(chosen)
    try:
        manifest = orjson.loads((chosen / MANIFEST).read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(f"the manifest cannot be read: {error}", where=str(chosen / MANIFEST)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError("the manifest is of another format", where=str(chosen), expected=f"format {FORMAT}")
    try:
        step, run_facts, files = int(manifest["step"]), dict(manifest["facts"]), dict(manifest["files"])
        sealed = {name: (int(file["size"]), str(file["sha256"])) for name, file in files.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest is damaged: {error!r}", where=str(chosen / MANIFEST)) from error
    for name, (size, sha256) in sealed.items():
        _verify(chosen / name, size, sha256)
    return Checkpoint(folder=chosen, step=step, facts=run_facts)


def _newest(root: Path) -> Path:
    steps = {int(match[1]): child for child in root.iterdir() if (match := _STEP_NAME.fullmatch(child.name))}
    if not steps:
        raise CheckpointError(
            "the folder holds no checkpoint", where=f"--load {root}", expected=f"folders step_NNNNNN with a {MANIFEST}"
        )
    return steps[max(steps)]


def _verify(path: Path, size: int, sha256: str) -> None:
    if not path.is_file():
        raise CheckpointError("the file is missing", where=str(path))
    found = path.stat().st_size
    if found != size:
        raise CheckpointError(f"the file is damaged: {found} bytes", where=str(path), expected=f"{size} bytes")
    if _sha256(path) != sha256:
        raise CheckpointError("the file is damaged: its hash differs from the manifest's", where=str(path))


def _seal(folder: Path, step: int, facts: Mapping[str, Any]) -> None:
    files = {}
    for path in sorted(child for child in folder.rglob("*") if child.is_file()):
        _sync(path)
        files[str(path.relative_to(folder))] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"format": FORMAT, "step": step, "facts": dict(facts), "files": files}
    (folder / MANIFEST).write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
    _sync(folder / MANIFEST)
    for directory in (*(child for child in folder.rglob("*") if child.is_dir()), folder):
        _sync(directory)
    folder.chmod(0o755)  # mkdtemp makes it private


def _forget_unfinished(target: Path) -> None:
    """A run that was killed while it wrote this step left its temporary folder behind."""
    replaced = _replaced(target)
    for folder in target.parent.glob(f".{target.name}.*"):
        if folder != replaced:
            shutil.rmtree(folder, ignore_errors=True)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _swap(temporary: Path, target: Path) -> None:
    old = _replaced(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()
