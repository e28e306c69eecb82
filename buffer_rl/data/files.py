"""Bytes of data files: local paths, and whatever fsspec reaches (``s3://…``, ``gs://…``, ``hf://…``, ``memory://…``).

A path may have a slice of rows. A file whose name ends in ``.gz``, ``.bz2`` or ``.xz`` (or in the suffix of another
compression that fsspec knows) is decompressed. fsspec and its backends are imported when such a path is read, never
before. A large local file is read on access (``LocalFile``); every other one as a whole.
"""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import hashlib
import io
import lzma
import os
import re
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from buffer_rl.errors import DataError
from buffer_rl.files.remote import file_system, is_remote, unreadable
from buffer_rl.options.redaction import mask_url

_SLICE = re.compile(r"\[\s*([+-]?\d+)?\s*:\s*([+-]?\d+)?\s*\]")

MIN_BYTES = 32 << 20
"""Of a file that is read on access."""
_READ_BYTES = 1 << 18
_OPENERS: Mapping[str, Callable[[io.BytesIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_BLOCK_BYTES = 4096  # small: a damaged block is lost as a whole
# What fsspec decompresses beside these, where the package for it is installed.
_OTHER_SUFFIXES: Mapping[str, str] = {".zst": "zstd", ".lz4": "lz4", ".snappy": "snappy", ".zip": "zip"}


def split_slice(text: str) -> tuple[str, slice]:
    """The path and the slice of rows of ``PATH`` or ``PATH@[start:stop]``. Raises DataError for a malformed slice."""
    path, marker, rest = text.rpartition("@[")
    if not marker:
        return text, slice(None)
    match = _SLICE.fullmatch("[" + rest)
    if match is None:
        raise DataError(f"malformed slice '@[{rest}'", where=path, expected="file.jsonl@[start:stop]")
    return path, slice(*(int(end) if end else None for end in match.groups()))


class LocalFile:
    """The bytes of a local file; slices are read on access. Another file under its name changes nothing here.

    Not mapped into memory: a file that shrinks while it is read must end in an error, not in SIGBUS."""

    def __init__(self, path: str, state: tuple[int, ...] = (), sha256: str = "") -> None:
        with _reading("the file", path):
            self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self.path = path
        self._state = state or self._now()
        self._sha256 = sha256

    def __len__(self) -> int:
        return self._state[2]

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        with _reading("the file", self.path):
            return os.pread(self._descriptor, stop - start, start)  # the file has no position that readers share

    def __reduce__(self) -> tuple[object, ...]:
        return LocalFile, (self.path, self._state, self._sha256)

    def seal(self, sha256: str) -> None:
        """Take ``sha256`` for the content's. Raises DataError if the file was changed since it was opened."""
        if self._now() != self._state:
            hint = "start again when it is complete"
            raise DataError("the file was changed while it was read", where=self.path, hint=hint)
        self._sha256 = sha256

    def check(self) -> None:
        """Raises DataError once the content was changed in place. A file that was only touched is hashed again, once
        for each time, which takes 2 seconds of 1 GB."""
        now = self._now()
        if now == self._state:
            return
        if now[:3] != self._state[:3] or digest_of(self).hexdigest() != self._sha256 or self._now() != now:
            raise DataError("the file was changed since it was checked", where=self.path, hint="start again")
        self._state = now

    def _now(self) -> tuple[int, ...]:
        """The ctime is left out: renaming the file and changing its mode touch it too."""
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


Content = bytes | LocalFile


def open_content(path: str) -> Content:
    """A large local file, not compressed, to be read on access; the bytes of every other one, as ``read_bytes``."""
    if not is_remote(path) and uncompressed_name(path) == path:
        with contextlib.suppress(OSError):
            if os.stat(path).st_size >= MIN_BYTES:
                return LocalFile(path)
    return read_bytes(path)


def read_in_blocks(content: Content) -> Iterator[bytes]:
    """All bytes in their order."""
    return (content[position : position + _READ_BYTES] for position in range(0, len(content), _READ_BYTES))


def digest_of(*contents: Content) -> hashlib._Hash:
    """The SHA-256 of the contents, one behind the other."""
    digest = hashlib.sha256()
    for content in contents:
        for block in read_in_blocks(content):
            digest.update(block)
    return digest


def read_bytes(path: str) -> bytes:
    """The whole file, decompressed. Raises DataError naming the path if it cannot be read, or if a package is missing
    for it."""
    return _decompress(path, _read_remote(path) if is_remote(path) else _read_local(path))


def uncompressed_name(path: str) -> str:
    """The path without the suffix of a compression."""
    suffix = PurePosixPath(path).suffix.lower()
    return path[: -len(suffix)] if suffix in _OPENERS or suffix in _OTHER_SUFFIXES else path


def is_folder(path: str) -> bool:
    """Whether there is a folder at ``path``. Raises DataError as ``read_bytes`` does."""
    if not is_remote(path):
        return Path(path).is_dir()
    return bool(_ask_remote(path, lambda system, inner: system.isdir(inner)))


def exists(path: str) -> bool:
    """Whether there is a file or folder at ``path``. Raises DataError as ``read_bytes`` does."""
    if not is_remote(path):
        return Path(path).exists()
    return bool(_ask_remote(path, lambda system, inner: system.exists(inner)))


def join(folder: str, name: str) -> str:
    """The path of ``name`` in a folder."""
    return f"{folder.rstrip('/')}/{name}"


def list_folder(path: str) -> list[str]:
    """The names of the files in a folder, sorted. Raises DataError as ``read_bytes`` does."""
    if not is_remote(path):
        with _reading("the folder", path):
            return sorted(child.name for child in Path(path).iterdir() if child.is_file())
    entries = _ask_remote(path, lambda system, inner: system.ls(inner, detail=True))
    return sorted(PurePosixPath(str(entry["name"])).name for entry in entries if entry["type"] == "file")


def matches(pattern: str) -> list[str]:
    """The paths of the files that a pattern (``*``, ``?``, ``[…]``, ``**``) matches, sorted. Raises DataError."""
    if not is_remote(pattern):
        return sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    system, _ = file_system(pattern)
    found = _ask_remote(pattern, lambda system, inner: system.glob(inner, detail=True))
    return sorted(system.unstrip_protocol(name) for name, entry in found.items() if entry["type"] == "file")


def _ask_remote(path: str, question: Callable[[Any, str], Any]) -> Any:
    system, inner = file_system(path)
    try:
        return question(system, inner)
    except Exception as error:  # fault boundary: every backend raises errors of its own
        raise unreadable(path, error) from error


def _read_local(path: str) -> bytes:
    with _reading("the file", path), contextlib.suppress(FileNotFoundError):
        return Path(path).read_bytes()
    hint = f"the current folder is {Path.cwd()}"
    if len(several := path.replace(", ", ",").replace(" ", ",").split(",")) > 1 and all(several):
        hint += f". Several are a list: [{', '.join(several)}] in a YAML file, with spaces between them as a flag"
    if path.count("/") == 1 and not Path(path).suffix and not Path(path).parent.is_dir():
        download = f"hf download --repo-type dataset {path} --local-dir FOLDER"
        hint += f". A data set of the Hub is downloaded first: {download}"
    raise DataError("there is no such file", where=path, hint=hint)


@contextlib.contextmanager
def _reading(what: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {what}: {error.strerror}", where=path) from error


def _read_remote(path: str) -> bytes:
    try:
        return bytes(_ask_remote(path, lambda system, inner: system.cat_file(inner)))
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise DataError("there is no such file", where=mask_url(path)) from None
        raise


def _decompress(path: str, content: bytes) -> bytes:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in _OTHER_SUFFIXES:
        return _decompress_by_fsspec(path, content, _OTHER_SUFFIXES[suffix])
    if suffix not in _OPENERS:
        return content
    try:
        return bytes(_OPENERS[suffix](io.BytesIO(content)).read())
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        where = mask_url(path) + _first_lost_line(suffix, content)
        raise DataError(f"the file is no {suffix} file, or a damaged one: {error}", where=where) from error


def _first_lost_line(suffix: str, content: bytes) -> str:
    """``:LINE`` of the first line that cannot be read; empty where nothing can."""
    opened = _OPENERS[suffix](io.BytesIO(content))
    num_lines = num_bytes = 0
    with contextlib.suppress(OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        while block := opened.read(_BLOCK_BYTES):
            num_bytes += len(block)
            num_lines += block.count(b"\n")
    return f":{num_lines + 1}" if num_bytes else ""


def _decompress_by_fsspec(path: str, content: bytes, compression: str) -> bytes:
    try:
        from fsspec.compression import compr
    except ImportError as error:
        what = f"{compression} files need fsspec, which is not installed"
        raise DataError(what, where=mask_url(path), hint="pip install 'buffer-rl[data]'") from error
    if compression not in compr:
        hint = "pip install what fsspec names for it: zstandard, lz4 or python-snappy"
        raise DataError(f"the package that reads {compression} files is not installed", where=mask_url(path), hint=hint)
    try:
        with compr[compression](io.BytesIO(content), mode="rb") as file:
            decompressed: bytes = file.read()
    except Exception as error:  # fault boundary: every codec raises errors of its own
        where = mask_url(path)
        raise DataError(f"the file is no {compression} file, or a damaged one: {error}", where=where) from error
    return decompressed
