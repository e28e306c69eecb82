"""Which files a data source consists of: one, those of a folder, or those that a pattern matches."""

from __future__ import annotations

from dataclasses import dataclass

from buffer_rl.data import files
from buffer_rl.data.arrow import SPLITS_FILE, STATE_FILE, read_parquet, read_saved_folder
from buffer_rl.data.jsonl import JsonlTable
from buffer_rl.data.table import Table
from buffer_rl.errors import DataError
from buffer_rl.redaction import mask_url

# What counts as data in a folder, besides a suffix of a compression. Other files in it are left alone.
DATA_SUFFIXES = (".parquet", ".jsonl", ".ndjson")
_MAGIC = "*?["


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPart:
    """One file's records. start: number of records in the files before it."""

    path: str
    table: Table
    start: int

    @property
    def stop(self) -> int:
        """Number of records up to the end of this file."""
        return self.start + len(self.table)


def open_parts(path: str) -> list[OpenPart]:
    """The files behind ``path`` in the order of their names. Raises DataError if there is none or one is unreadable.

    A folder that Hugging Face's ``Dataset.save_to_disk`` wrote is one part; of any other folder, its data files
    (``DATA_SUFFIXES``), those in folders below it and those that begin with ``.`` or ``_`` excepted.
    """
    if _is_pattern(path):
        paths = files.matches(path)
        if not paths:
            raise DataError("no file matches the pattern", where=mask_url(path))
    elif files.is_folder(path) and not _is_saved_folder(path):
        paths = [files.join(path, name) for name in files.list_folder(path) if _is_data(name)]
        if not paths:
            raise DataError(
                "there are no data files in the folder",
                where=mask_url(path),
                expected=f"files {', '.join(DATA_SUFFIXES)}, or a folder that Dataset.save_to_disk wrote "
                f"(with {STATE_FILE})",
            )
    else:
        paths = [path]
    parts: list[OpenPart] = []
    for each in paths:
        parts.append(OpenPart(path=each, table=_open(each), start=parts[-1].stop if parts else 0))
    return parts


def _open(path: str) -> Table:
    if files.is_folder(path):
        return read_saved_folder(path)
    if files.uncompressed_name(path).lower().endswith(".parquet"):
        return read_parquet(path)
    return JsonlTable(files.read_bytes(path))


def _is_pattern(path: str) -> bool:
    """Whether ``path`` is to be matched: ``?`` begins the query of a web address, and a file may have such a name."""
    if path.startswith(("http://", "https://")) or not any(character in path for character in _MAGIC):
        return False
    return not files.exists(path)


def _is_saved_folder(path: str) -> bool:
    return any(files.exists(files.join(path, name)) for name in (STATE_FILE, SPLITS_FILE))


def _is_data(name: str) -> bool:
    return not name.startswith((".", "_")) and files.uncompressed_name(name).lower().endswith(DATA_SUFFIXES)
