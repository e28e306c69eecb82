"""Paths that fsspec reaches (``s3://…``, ``gs://…``, ``memory://…``).

fsspec and its backends are imported when a path with ``://`` is used, never before.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from buffer_rl.errors import BufferRLError, DataError
from buffer_rl.redaction import mask_url

LOCAL_SCHEMES = ("file", "local")


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
        raise error_type(
            f"the backend of fsspec for {scheme}:// is not installed: {error}",
            where=where,
            hint="pip install the package that the message names, besides 'buffer-rl[data]'",
        ) from error
    except Exception as error:  # fault boundary: an unknown protocol, wrong credentials, …
        raise unreadable(path, error, error_type) from error
    return system, inner


def unreadable(path: str, error: Exception, error_type: type[BufferRLError] = DataError) -> BufferRLError:
    """The error for a path that a backend refused."""
    return error_type(f"cannot read the path: {type(error).__name__}: {mask_url(str(error))}", where=mask_url(path))
