"""JSONL files of a run: one object a line, complete lines only, and an earlier run's file is kept aside."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
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

    keep: go on with the file that is there, keeping the records for which ``keep(record)`` is true; a last line
    that a killed run left unfinished goes too. Where it is None, an existing file is set aside. Safe to use from
    several threads.
    """

    def __init__(self, path: Path, *, keep: Callable[[Mapping[str, Any]], bool] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep is None:
            set_aside(path)
        elif path.exists():
            _keep_records(path, keep)
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


def records_before(resume_step: int | None, step_field: str) -> Callable[[Mapping[str, Any]], bool] | None:
    """Which records of an earlier run stay when a run goes on after ``resume_step`` steps; None keeps no file.

    Step ``r`` of training is the work of rollout ``r``, so it stays if it is below; an evaluation at step ``r`` is of
    the weights after ``r`` steps, so the one at ``resume_step`` itself stays as well.
    """
    if resume_step is None:
        return None
    last_eval, last_step = resume_step, resume_step - 1
    return lambda record: record[step_field] <= (last_eval if record.get("kind") == "eval" else last_step)


def _keep_records(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
    """Rewrite ``path`` with the records to keep; it is replaced in one go."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for record in read_jsonl(path):
            if keep(record):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    temporary.replace(path)
