"""Paths that fsspec reaches (``s3://…``, ``gs://…``, ``memory://…``), and checkpoints there, where there is no rename.

fsspec and its backends are imported when a path with ``://`` is used, never before.

``URL/step_NNNNNN/`` holds the files in a folder with a name of its own, and beside it the manifest, which names that
folder. The manifest is written last and alone says that there is a checkpoint: files without one are an upload that
did not end, or one that is under way. A later upload of the same step gets another folder, so the earlier checkpoint
stays whole until the new manifest has taken the place of the old.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson

from buffer_rl.errors import BufferRLError, CheckpointError, DataError
from buffer_rl.options.redaction import mask_url

LOCAL_SCHEMES = ("file", "local")
MANIFEST = "manifest.json"
FOLDER_KEY = "folder"
"""Of an uploaded manifest: the folder beside it that holds the files."""


def is_remote(path: str) -> bool:
    """Whether fsspec reads the path."""
    return "://" in path


def local_path(path: str) -> str:
    """``file:///x`` as ``/x``; everything else as it is."""
    scheme, separator, rest = path.partition("://")
    if not separator or scheme not in LOCAL_SCHEMES:
        return path
    return unquote(urlsplit(path).path) if scheme == "file" else rest


def file_system(path: str, error_type: type[BufferRLError] = DataError) -> tuple[Any, str]:
    """fsspec's file system for ``path``, and the path inside it.

    Raises ``error_type``, naming the URL, if fsspec or a backend is not installed or the backend refuses.
    """
    where = mask_url(path)
    try:
        import fsspec
    except ImportError as error:
        raise error_type(
            "remote paths need fsspec, which is not installed", where=where, hint="pip install 'buffer-rl[data]'"
        ) from error
    try:
        system, inner = fsspec.core.url_to_fs(path)
    except ImportError as error:
        scheme = path.partition("://")[0]
        what = f"the backend of fsspec for {scheme}:// is not installed: {error}"
        hint = "pip install the package that the message names, besides 'buffer-rl[data]'"
        raise error_type(what, where=where, hint=hint) from error
    except Exception as error:  # fault boundary: an unknown protocol, wrong credentials, …
        raise unreadable(path, error, error_type) from error
    return system, inner


def unreadable(path: str, error: Exception, error_type: type[BufferRLError] = DataError) -> BufferRLError:
    """The error for a path that a backend refused."""
    return error_type(f"cannot read the path: {type(error).__name__}: {mask_url(str(error))}", where=mask_url(path))


class RemoteFolder:
    """A folder of checkpoints at a URL, or one checkpoint in it. Every error names the URL, without its secrets."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._system, inner = file_system(self._url, CheckpointError)
        self._root = str(inner).rstrip("/")

    def upload(self, folder: Path, name: str) -> None:
        """Copy the sealed checkpoint ``folder`` to ``URL/name``. Raises CheckpointError; what was there is then as it
        was."""
        target = f"{self._root}/{name}"
        attempt = f"files_{secrets.token_hex(8)}"
        manifest = orjson.loads((folder / MANIFEST).read_bytes())
        content = orjson.dumps({**manifest, FOLDER_KEY: attempt}, option=orjson.OPT_INDENT_2)
        try:
            with self._naming("the checkpoint cannot be uploaded", name):
                self._put_files(folder, f"{target}/{attempt}", manifest["files"])
                # One object. A store makes it visible whole; elsewhere a torn manifest is none, because it is no JSON.
                self._system.pipe_file(f"{target}/{MANIFEST}", content)
        except CheckpointError:
            self._remove(f"{target}/{attempt}")
            raise
        self._remove_others(target, attempt)

    def names(self, *, missing_ok: bool = False) -> list[str]:
        """The names of everything in the folder, whether whole or not. Raises CheckpointError, also for a folder that
        is not there unless ``missing_ok``."""
        with self._naming("the folder cannot be read"), contextlib.suppress(FileNotFoundError):
            self._system.invalidate_cache()
            return [PurePosixPath(str(entry)).name for entry in self._system.ls(self._root, detail=False)]
        if missing_ok:
            return []
        raise CheckpointError("there is no such folder", where=f"--load {mask_url(self._url)}")

    def content(self, name: str, file: str) -> bytes | None:
        """One small file of ``URL/name``, or of the URL itself; None where it is not there. Raises CheckpointError."""
        path = "/".join(part for part in (self._root, name, file) if part)
        with self._naming("the file cannot be read", name, file), contextlib.suppress(FileNotFoundError):
            self._system.invalidate_cache()
            return bytes(self._system.cat_file(path))
        return None

    def put(self, name: str, file: str, content: bytes) -> None:
        """Write one small file beside the manifest of ``URL/name``. Raises CheckpointError."""
        with self._naming("the file cannot be written", name, file):
            self._system.pipe_file(f"{self._root}/{name}/{file}", content)

    def remove(self, name: str) -> None:
        """Remove ``URL/name``: its manifest is none first, and goes last. Raises CheckpointError."""
        self.put(name, MANIFEST, b"")
        self._remove_others(f"{self._root}/{name}", "")
        self._remove(f"{self._root}/{name}")

    def download(self, name: str, file: str, target: Path) -> None:
        """Copy one file of ``URL/name`` to ``target``. Raises CheckpointError."""
        path = "/".join(part for part in (self._root, name, file) if part)
        with self._naming("the file cannot be downloaded", name, file), contextlib.suppress(FileNotFoundError):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._system.get_file(path, str(target))
            return
        raise CheckpointError("the file is missing", where=self.where(name, file))

    def where(self, *parts: str) -> str:
        """The URL of a file in the folder, as it may be shown."""
        return mask_url("/".join(part for part in (self._url, *parts) if part))

    def _put_files(self, folder: Path, target: str, sealed: dict[str, Any]) -> None:
        for name, file in sealed.items():
            self._system.makedirs(str(PurePosixPath(target, name).parent), exist_ok=True)
            self._system.put_file(str(folder / name), f"{target}/{name}")
            found = self._system.size(f"{target}/{name}")
            if found is not None and found != file["size"]:
                raise OSError(f"{name}: {found} bytes arrived of {file['size']}")

    def _remove_others(self, target: str, attempt: str) -> None:
        """The files of replaced and of unfinished uploads. What cannot be removed costs room and nothing else."""
        with contextlib.suppress(Exception):  # fault boundary: the checkpoint itself is there
            self._system.invalidate_cache()
            for entry in self._system.ls(target, detail=False):
                if PurePosixPath(str(entry)).name not in (attempt, MANIFEST):
                    self._remove(str(entry))

    def _remove(self, path: str) -> None:
        with contextlib.suppress(Exception):  # fault boundary: another error may be on its way
            self._system.rm(path, recursive=True)

    @contextlib.contextmanager
    def _naming(self, what: str, *parts: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # fault boundary: every backend raises errors of its own
            text = f"{what}: {type(error).__name__}: {mask_url(str(error))}"
            raise CheckpointError(text, where=self.where(*parts)) from error
