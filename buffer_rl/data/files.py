"""Bytes of data files: local paths, and whatever fsspec reaches (``s3://…``, ``gs://…``, ``hf://…``, ``memory://…``).

fsspec and its backends are imported when a path with ``://`` is read, never before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from buffer_rl.errors import DataError


def is_remote(path: str) -> bool:
    """Whether fsspec reads the path."""
    return "://" in path


def read_bytes(path: str) -> bytes:
    """The whole file. Raises DataError naming the path if it cannot be read, or if a package is missing for it."""
    if is_remote(path):
        return _read_remote(path)
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise DataError("there is no such file", where=path, hint=f"the current folder is {Path.cwd()}") from None
    except OSError as error:
        raise DataError(f"cannot read the file: {error.strerror}", where=path) from error


def is_folder(path: str) -> bool:
    """Whether there is a folder at ``path``. Raises DataError as ``read_bytes`` does."""
    if not is_remote(path):
        return Path(path).is_dir()
    system, inner = _file_system(path)
    try:
        return bool(system.isdir(inner))
    except Exception as error:  # fault boundary: every backend raises errors of its own
        raise _unreadable(path, error) from error


def exists(path: str) -> bool:
    """Whether there is a file or folder at ``path``. Raises DataError as ``read_bytes`` does."""
    if not is_remote(path):
        return Path(path).exists()
    system, inner = _file_system(path)
    try:
        return bool(system.exists(inner))
    except Exception as error:  # fault boundary: every backend raises errors of its own
        raise _unreadable(path, error) from error


def join(folder: str, name: str) -> str:
    """The path of ``name`` in a folder."""
    return f"{folder.rstrip('/')}/{name}"


def _read_remote(path: str) -> bytes:
    system, inner = _file_system(path)
    try:
        content: bytes = system.cat_file(inner)
    except FileNotFoundError:
        raise DataError("there is no such file", where=path) from None
    except Exception as error:  # fault boundary: every backend raises errors of its own
        raise _unreadable(path, error) from error
    return content


def _file_system(path: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise DataError(
            "remote paths need fsspec, which is not installed", where=path, hint="pip install 'buffer-rl[data]'"
        ) from error
    try:
        system, inner = fsspec.core.url_to_fs(path)
    except ImportError as error:
        scheme = path.partition("://")[0]
        raise DataError(
            f"the backend of fsspec for {scheme}:// is not installed: {error}",
            where=path,
            hint="pip install the package that the message names, besides 'buffer-rl[data]'",
        ) from error
    except Exception as error:  # fault boundary: an unknown protocol, wrong credentials, …
        raise _unreadable(path, error) from error
    return system, inner


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(f"cannot read the path: {type(error).__name__}: {error}", where=path)
