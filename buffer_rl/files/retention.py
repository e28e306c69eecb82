"""Which checkpoints of a folder or URL remain, and how each was evaluated.

The evaluation of a step comes after its checkpoint, whose manifest is sealed by then: it is in ``evaluation.json``
beside the manifest. A local checkpoint is removed by a rename to a hidden name first, so that ``step_NNNNNN`` is whole
or absent; what a kill leaves under the hidden name is removed by the next run (``remove_unfinished``).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import orjson

from buffer_rl.files.checkpoint import MANIFEST, STEP_NAME, Manifest, lock_file, parse_manifest
from buffer_rl.files.remote import RemoteFolder, is_remote, local_path

EVALUATION = "evaluation.json"


class Held(NamedTuple):
    """A whole checkpoint of a folder. scores: its evaluation, by metric (``eval/NAME``); empty if there was none."""

    name: str
    manifest: Manifest
    scores: Mapping[str, float | None]


def best_step(scores: Mapping[int, Mapping[str, float | None]], metric: str) -> int | None:
    """The step with the highest score, or the lowest if ``metric`` has a leading ``-``; of equal ones the newest. None
    if none has one."""
    sign, name = (-1, metric[1:]) if metric.startswith("-") else (1, metric)
    ranked = [(sign * score, step) for step, found in scores.items() if (score := found.get(name)) is not None]
    return max(ranked)[1] if ranked else None


def kept_steps(scores: Mapping[int, Mapping[str, float | None]], last: int, best: str | None = None) -> set[int]:
    """Those of the steps in ``scores`` that remain: the newest ``last``, at least 1, and the one with the best score.

    best: a metric, as for ``best_step``."""
    newest, best_one = sorted(scores)[-last:], best_step(scores, best or "")
    return {step for step in scores if step in newest or step == best_one}


class LocalFolder:
    """The checkpoints in a local folder, as ``RemoteFolder`` has those at a URL. Raises OSError."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def names(self) -> list[str]:
        """The names of everything in the folder; none if it is not there."""
        return os.listdir(self._root) if self._root.is_dir() else []

    def content(self, name: str, file: str) -> bytes | None:
        """One small file of a checkpoint; None if it is not there."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return (self._root / name / file).read_bytes()
        return None

    def put(self, name: str, file: str, content: bytes) -> None:
        """Write one small file beside a manifest."""
        (self._root / name / file).write_bytes(content)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, unless it is being read (see ``opened_checkpoint``)."""
        hidden = self._root / f".{name}.removed"
        with (self._root / name / MANIFEST).open("rb") as file:
            if lock_file(file, fcntl.LOCK_EX) is False:
                return
            for earlier in (hidden, hidden.with_suffix(".replaced")):  # of a kill; the latter would take its place
                shutil.rmtree(earlier, ignore_errors=True)
            (self._root / name).rename(hidden)
        shutil.rmtree(hidden)


CheckpointFolder = LocalFolder | RemoteFolder


def folder_at(root: str) -> CheckpointFolder:
    """The folder or URL of ``--save``. Raises CheckpointError if no backend reaches the URL."""
    return RemoteFolder(root, MANIFEST) if is_remote(local_path(root)) else LocalFolder(local_path(root))


def held_checkpoints(folder: CheckpointFolder, newest: int = 0) -> dict[int, Held]:
    """The checkpoints in a folder by step, from the oldest to the newest; at most the ``newest`` last, all where 0.
    Raises CheckpointError if one is damaged, or a URL cannot be read; OSError of a local folder."""
    steps = sorted((int(match[1]), name) for name in folder.names() if (match := STEP_NAME.fullmatch(name)))
    found = {}
    for step, name in steps[-newest:]:
        manifest, scores = folder.content(name, MANIFEST) or b"", folder.content(name, EVALUATION) or b""
        if manifest.rstrip().endswith(b"}"):  # else it is no checkpoint: at a URL, of an upload that did not end
            noted = orjson.loads(scores if scores.endswith(b"}") else b"{}")  # the same for what a kill cut off
            found[step] = Held(name, parse_manifest(manifest, name), noted)
    return found
