"""Copies of the ledger: into a checkpoint, and back beside the ledger of a run that goes on from one."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from buffer_rl.buffer.ledger_file import open_for_reading
from buffer_rl.errors import CheckpointError

_BLOCK = 1 << 20


def write_backup(db: sqlite3.Connection, path: Path, target: Path) -> None:
    """Copy the database ``db`` of the file ``path``, as of one moment, into the new file ``target``: one file without a
    WAL beside it, flushed to disk. SQLite writes beside ``path``; only whole files go to ``target``, which may be on a
    file system without locks or random writes. Raises CheckpointError if it cannot be written."""
    local, temporary = path.with_name(f".{path.name}.backup"), target.with_name(f"{target.name}.tmp")
    try:
        local.unlink(missing_ok=True)  # of a process that was killed
        copy = sqlite3.connect(local, isolation_level=None)
        try:
            db.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
        finally:
            copy.close()
        shutil.copyfile(local, temporary)
        _sync(temporary)
        os.replace(temporary, target)
        _sync(target.parent)
    except (sqlite3.Error, OSError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"the ledger cannot be copied: {error}", where=str(target)) from error
    finally:
        local.unlink(missing_ok=True)


@contextmanager
def local_copy(source: Path, path: Path) -> Iterator[Path]:
    """The ledger ``source``, checked, as a file beside ``path`` for the length of the block. Raises CheckpointError,
    which names the source if that is at fault, and the file beside ``path`` if the disk under it is."""
    local = path.with_name(f".{path.name}.restore")
    try:
        _copy(source, local)
        try:
            open_for_reading(local).close()
        except CheckpointError as error:
            raise CheckpointError(error.what, where=str(source)) from error
        yield local
    finally:
        local.unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> None:
    try:
        reading = source.open("rb")
    except OSError as error:
        raise _unreadable(source, error) from error
    with reading:
        try:
            with target.open("wb") as writing:
                while block := _block(reading, source):
                    writing.write(block)
        except OSError as error:
            raise CheckpointError(
                f"the copy of the ledger cannot be put beside the run's own: {error}",
                where=str(target),
                hint=f"is its disk full? {str(source)!r} is as it was",
            ) from error


def _block(file: BinaryIO, source: Path) -> bytes:
    try:
        return file.read(_BLOCK)
    except OSError as error:
        raise _unreadable(source, error) from error


def _unreadable(source: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"the copy of the ledger cannot be read: {error}", where=str(source))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
