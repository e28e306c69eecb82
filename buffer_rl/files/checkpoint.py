"""Checkpoints: a folder a step, complete or absent, with a manifest of every file's size and hash.

A checkpoint is written into a temporary folder, every file is flushed to disk, and the folder gets its name by
one rename; so a folder named ``step_NNNNNN`` is whole, whatever happened while it was written. Opening one checks every
hash: a missing or damaged checkpoint is an error, never a fresh start.

The evaluation of a step comes after its checkpoint, whose manifest is sealed by then: it is in ``evaluation.json``
beside the manifest. A local checkpoint is removed by a rename to a hidden name first, so that ``step_NNNNNN`` is whole
or absent; what a kill leaves under the hidden name is removed by the next run (``remove_unfinished``).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from buffer_rl.errors import BufferRLError, CheckpointError, raised_as
from buffer_rl.files.remote import FOLDER_KEY, MANIFEST, RemoteFolder, is_remote, local_path
from buffer_rl.options.redaction import mask_url
from buffer_rl.records.utf8 import encodable

FORMAT = 2
UNSEALED_FORMAT = 1
"""Of earlier versions: without a hash of the manifest itself."""
EVALUATION = "evaluation.json"
_SEAL = "manifest_sha256"
STEP_NAME = re.compile(r"step_(\d{6,})")
_REPLACED_NAME = re.compile(r"\.(step_(\d{6,}))\.replaced")
_UNFINISHED_NAME = re.compile(r"\.(step_\d{6,}|load)\.(?!replaced$)\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a manifest says. files: size in bytes and SHA-256 by name. folder: where they are, beside the manifest."""

    step: int
    facts: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint. ``facts`` is what the writer noted about the run."""

    folder: Path
    step: int
    facts: Mapping[str, Any]


@contextmanager
def new_checkpoint(
    root: str | Path, step: int, facts: Mapping[str, Any], scratch: str | Path | None = None
) -> Iterator[Path]:
    """Write the checkpoint ``step_NNNNNN`` in ``root``, a folder or a URL. The block fills a temporary folder, which
    is sealed after it, and renamed or uploaded.

    A checkpoint of the same step is replaced only once the new one is whole. What goes to a URL is written into a
    folder in ``scratch`` first (the system's where None), where there must be room for it. Raises what the block
    raises, and CheckpointError if disk or store refuse; the temporary folder is gone then.
    """
    name = f"step_{step:06d}"
    if is_remote(local_path(str(root))):
        remote = RemoteFolder(str(root))
        base = Path(scratch or tempfile.gettempdir())
        with _writing(remote.where(name)), _temporary_folder(base, f".{name}.") as temporary:
            yield temporary
            _seal(temporary, step, facts)
            remote.upload(temporary, name)
        return
    target = Path(local_path(str(root)), name)
    with _writing(str(target)), _temporary_folder(target.parent, f".{name}.", replaces=target) as temporary:
        yield temporary
        _seal(temporary, step, facts)
        _swap(temporary, target)


@contextmanager
def opened_checkpoint(path: str | Path, scratch: str | Path | None = None) -> Iterator[Checkpoint]:
    """``open_checkpoint`` for the length of the block, in which no run removes it (``LocalFolder.remove``). Also for
    URLs: their files are downloaded into a temporary folder in ``scratch`` (the system's where None), checked there,
    and removed afterwards."""
    if not is_remote(local_path(str(path))):
        chosen = _chosen(path)
        with ExitStack() as stack:
            with suppress(OSError):  # of a manifest that is missing, too: it is an error below
                lock_file(stack.enter_context((chosen / MANIFEST).open("rb")), fcntl.LOCK_SH)
            yield open_checkpoint(chosen)
        return
    remote = RemoteFolder(str(path))
    name, manifest = _newest_remote(remote)
    with _temporary_folder(Path(scratch or tempfile.gettempdir()), ".load.") as temporary:
        for file, (size, sha256) in manifest.files.items():
            remote.download("/".join(part for part in (name, manifest.folder) if part), file, temporary / file)
            _verify(temporary / file, size, sha256, where=remote.where(name, manifest.folder, file))
        yield Checkpoint(folder=temporary, step=manifest.step, facts=manifest.facts)


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the checkpoint at ``path`` (a folder, a URL, or one of several checkpoints), whose files are not
    looked at. Raises CheckpointError."""
    if is_remote(local_path(str(path))):
        return _newest_remote(RemoteFolder(str(path)))[1]
    chosen = _chosen(path)
    with _older_named(chosen):
        return _read_manifest(chosen)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at ``path``, or the newest one in the folder ``path``, with every hash checked.

    Raises CheckpointError naming the file that is missing or damaged, and the checkpoint before it, which is not taken
    in its place.
    """
    chosen = _chosen(path)
    with _older_named(chosen):
        manifest = _read_manifest(chosen)
        folder = chosen / manifest.folder  # one that was copied from a store has its files a folder below
        for name, (size, sha256) in manifest.files.items():
            _verify(folder / name, size, sha256)
    return Checkpoint(folder=folder, step=manifest.step, facts=manifest.facts)


def checkpoints_at(path: str | Path) -> list[Path]:
    """The checkpoint ``path``, or all of those in this folder, the oldest first. Raises CheckpointError if there is
    none."""
    folder = Path(local_path(str(path)))
    if not folder.is_dir():
        raise CheckpointError("there is no such folder", where=str(folder))
    if (folder / MANIFEST).exists() or STEP_NAME.fullmatch(folder.name):
        return [folder]
    return [chosen for _, chosen in sorted(_steps(folder, where=str(folder)).items())]


def newest_step(path: str | Path) -> int:
    """The step of the newest checkpoint in the folder or at the URL ``path``; 0 where there is none, or no folder yet.
    Raises CheckpointError if that cannot be found out."""
    if is_remote(local_path(str(path))):
        remote = RemoteFolder(str(path))
        return next((step for step, _, _ in _remote_checkpoints(remote, remote.names(missing_ok=True))), 0)
    folder = Path(local_path(str(path)))
    with raised_as(CheckpointError, "the folder cannot be read", OSError, where=str(path)):
        return max(_steps_in(folder), default=0) if folder.is_dir() else 0


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Remove what writers and readers that were killed left behind, of the checkpoint ``name`` alone if it is given.
    The caller must be the only user of the folder, or of the checkpoint."""
    for child in folder.iterdir():
        if _UNFINISHED_NAME.fullmatch(child.name) and child.name.startswith(f".{name}"):
            shutil.rmtree(child, ignore_errors=True)


def lock_file(file: IO[Any], kind: int) -> bool | None:
    """Lock an open file, without waiting: whether that was possible, and None on a file system without locks. kind:
    ``fcntl.LOCK_EX`` or ``fcntl.LOCK_SH``. The lock ends with the file, or with the process."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def make_folder(folder: Path) -> None:
    """``mkdir -p``, and a power loss does not take the new folders away again. Raises OSError."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        with suppress(PermissionError):  # of a parent that may be written to and not be read
            sync_path(path.parent)


def damaged_files(folder: Path) -> list[CheckpointError]:
    """What is wrong with each file of one checkpoint, the manifest included; empty where it is whole."""
    try:
        manifest = _read_manifest(folder)
    except CheckpointError as error:
        return [error]
    found = []
    for name, (size, sha256) in manifest.files.items():
        try:
            _verify(folder / manifest.folder / name, size, sha256)
        except CheckpointError as error:
            found.append(error)
    return found


def manifest_content(step: int, facts: Mapping[str, Any], files: Mapping[str, tuple[int, str]]) -> bytes:
    """The bytes of a manifest. The inverse of ``parse_manifest``."""
    listed = {name: {"size": size, "sha256": sha256} for name, (size, sha256) in files.items()}
    # As they will be read: what a mapping's keys are in JSON is part of the hash.
    values = orjson.loads(
        orjson.dumps({"format": FORMAT, "step": step, "facts": encodable(dict(facts)), "files": listed})
    )
    return orjson.dumps({**values, _SEAL: _seal_of(values)}, option=orjson.OPT_INDENT_2)


def parse_manifest(content: bytes, where: str) -> Manifest:
    """What a manifest's bytes say. Raises CheckpointError naming ``where`` if they are damaged or of another format."""
    with raised_as(CheckpointError, "the manifest cannot be read", orjson.JSONDecodeError, where=where):
        manifest = orjson.loads(content)
    if not isinstance(manifest, dict) or manifest.get("format") not in (FORMAT, UNSEALED_FORMAT):
        raise CheckpointError("the manifest is of another format", where=where, expected=f"format {FORMAT}")
    try:
        files = {name: (int(file["size"]), str(file["sha256"])) for name, file in dict(manifest["files"]).items()}
        folder = str(manifest.get(FOLDER_KEY, ""))
        if any(path.startswith("/") or ".." in path.split("/") for path in (folder, *files)):
            raise ValueError("a path leads out of the checkpoint")
        parsed = Manifest(step=int(manifest["step"]), facts=dict(manifest["facts"]), files=files, folder=folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest is damaged: {error!r}", where=where) from error
    if (manifest["format"] == FORMAT or _SEAL in manifest) and manifest.get(_SEAL) != _seal_of(manifest):
        raise CheckpointError("the manifest is damaged: it differs from its own hash", where=where)
    return parsed


def _chosen(path: str | Path) -> Path:
    chosen = Path(local_path(str(path)))
    if not chosen.is_dir():
        hint = f"the current folder is {Path.cwd()}"
        raise CheckpointError("there is no such folder", where=f"--load {mask_url(str(path))}", hint=hint)
    if (chosen / MANIFEST).exists():
        return chosen
    return max(_steps(chosen, where=f"--load {chosen}").items())[1]


def _read_manifest(chosen: Path) -> Manifest:
    where = chosen / MANIFEST
    with raised_as(CheckpointError, "the manifest cannot be read", OSError, where=str(where)):
        return parse_manifest(where.read_bytes(), str(where))


@contextmanager
def _older_named(chosen: Path) -> Iterator[None]:
    """Name the checkpoint before ``chosen`` in an error about it, if there is one: only the user can say whether steps
    may be lost."""
    try:
        yield
    except CheckpointError as error:
        named = STEP_NAME.fullmatch(chosen.name)
        steps = _steps_in(chosen.parent) if named else {}
        if named and (older := [step for step in steps if step < int(named[1])]):
            error.hint = error.hint or f"copy it again, or resume from the one before it: --load {steps[max(older)]}"
        error.hint = error.hint or "copy it again; there is none before it here: a run without --load starts at step 0"
        raise


def _newest_remote(remote: RemoteFolder) -> tuple[str, Manifest]:
    """Name and manifest of the newest checkpoint; an empty name where the URL is that of one checkpoint.

    A folder without manifest, or with one that was cut off while it was written, is an upload that did not end.
    """
    if content := remote.content("", MANIFEST):
        return "", parse_manifest(content, remote.where(MANIFEST))
    for _, name, content in _remote_checkpoints(remote, remote.names()):
        return name, parse_manifest(content, remote.where(name, MANIFEST))
    raise _holds_none(f"--load {remote.where()}")


def _remote_checkpoints(remote: RemoteFolder, names: Sequence[str]) -> Iterator[tuple[int, str, bytes]]:
    """Step, name and manifest of each checkpoint, the newest first."""
    steps = {int(match[1]): name for name in names if (match := STEP_NAME.fullmatch(name))}
    for step in sorted(steps, reverse=True):
        content = remote.content(steps[step], MANIFEST)
        if content and content.rstrip().endswith(b"}"):
            yield step, steps[step], content


@contextmanager
def _writing(where: str) -> Iterator[None]:
    """What the disk refuses, as a CheckpointError."""
    try:
        yield
    except BufferRLError:  # a deadline of this library is an OSError too
        raise
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written: {error}", where=where) from error


@contextmanager
def _temporary_folder(base: Path, prefix: str, *, replaces: Path | None = None) -> Iterator[Path]:
    """A new folder in ``base``, removed after the block unless it was renamed. Raises CheckpointError if it cannot be
    made."""
    with raised_as(CheckpointError, "the checkpoint folder cannot be made", OSError, where=str(base)):
        make_folder(base)
        if replaces is not None:
            remove_unfinished(base, replaces.name)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _steps_in(root: Path) -> dict[int, Path]:
    children = list(root.iterdir())
    # A run that was killed between the two renames of ``_swap`` left the earlier checkpoint of the step, whole, there.
    steps = {int(match[2]): child for child in children if (match := _REPLACED_NAME.fullmatch(child.name))}
    return steps | {int(match[1]): child for child in children if (match := STEP_NAME.fullmatch(child.name))}


def _steps(root: Path, where: str) -> dict[int, Path]:
    if not (steps := _steps_in(root)):
        raise _holds_none(where)
    return steps


def _holds_none(where: str) -> CheckpointError:
    expected = f"folders step_NNNNNN with a {MANIFEST}"
    return CheckpointError("the folder holds no checkpoint", where=where, expected=expected)


def _verify(path: Path, size: int, sha256: str, where: str = "") -> None:
    where = where or str(path)
    if not path.is_file():
        raise CheckpointError("the file is missing", where=where)
    found = path.stat().st_size
    if found != size:
        raise CheckpointError(f"the file is damaged: {found} bytes", where=where, expected=f"{size} bytes")
    if _sha256(path) != sha256:
        raise CheckpointError("the file is damaged: its hash differs from the manifest's", where=where)


def _seal(folder: Path, step: int, facts: Mapping[str, Any]) -> None:
    files = {}
    for path in sorted(child for child in folder.rglob("*") if child.is_file()):
        sync_path(path)
        files[str(path.relative_to(folder))] = (path.stat().st_size, _sha256(path))
    (folder / MANIFEST).write_bytes(manifest_content(step, facts, files))
    sync_path(folder / MANIFEST)
    for directory in (*(child for child in folder.rglob("*") if child.is_dir()), folder):
        sync_path(directory)
    folder.chmod(0o755)  # mkdtemp makes it private


def _swap(temporary: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.replaced")
    if target.exists():  # else ``old``, if it is there, is the one checkpoint of the step until the next rename
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    temporary.rename(target)
    sync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_path(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal_of(manifest: Mapping[str, Any]) -> str:
    """Of everything but the hash itself and the folder, which an upload adds."""
    sealed = {name: value for name, value in manifest.items() if name not in (_SEAL, FOLDER_KEY)}
    return hashlib.sha256(orjson.dumps(sealed, option=orjson.OPT_SORT_KEYS)).hexdigest()


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
    return RemoteFolder(root) if is_remote(local_path(root)) else LocalFolder(local_path(root))


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
