"""JSONL files of a run: one object a line, complete lines only, and an earlier run's file is kept aside."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from buffer_rl.errors import DataError


def set_aside(path: Path) -> Path | None:
    """Rename ``path`` (a file or a folder) to the first free ``NAME.N.SUFFIX``, N from 1, where it exists.

    A run that starts anew in a folder that was used before then neither mixes its records with the old ones
    nor deletes them. Returns the new path, or None if there was nothing to move.
    """
    if not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)
    return target


class JsonlWriter:
    """Appends records to a file; every line is flushed, so that a reader never waits for a buffer.

    resume: go on with the file that is there, after cutting off a last line that a killed run left unfinished.
    Otherwise an existing file is set aside. Safe to use from several threads.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume:
            _cut_unfinished_line(path)
        else:
            set_aside(path)
        self.path = path
        self._lock = threading.Lock()
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line. Raises ``ValueError`` for NaN or infinity and ``TypeError`` for what JSON cannot hold."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._lock:
            self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All complete records of ``path``; an unfinished last line (a run still writing, or killed) is left out.

    Raises DataError naming file and line for a line that is not a JSON object, or if there is no such file.
    """
    if not path.is_file():
        raise DataError("there is no such file", where=str(path), expected="the metrics or samples of a run")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"not JSON: {error}", where=f"{path}:{number}", expected="one object a line") from error
        if not isinstance(record, dict):
            raise DataError(
                f"a {type(record).__name__}, not an object", where=f"{path}:{number}", expected="one object a line"
            )
        records.append(record)
    return records


def _cut_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    complete = data.rfind(b"\n") + 1
    if complete != len(data):
        with path.open("r+b") as file:
            file.truncate(complete)
