"""Ranges of a file scanned by processes: ``python -m buffer_rl.data.scan_process``.

A process of its own program, not a fork, which would copy Ray's and torch's threads, and not ``multiprocessing``,
which imports the caller's script again. The child reads its job as JSON and writes JSON and arrays of numbers.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl.data.row import RowKeys
from buffer_rl.data.scan import RangeScan, scan_range
from buffer_rl.errors import DataError

TIMEOUT_S = 3600.0
"""Deadline of one file; a gigabyte takes a process a quarter of a minute."""
_HEADER = struct.Struct("<QQQQ")  # bytes of the JSON, and numbers of rows, of ids and of ids


class ScanProcesses:
    """One process for each range. Use it as a context manager: leaving it ends them all."""

    def __init__(self, path: str, ranges: Sequence[tuple[int, int]], keys: RowKeys) -> None:
        self._path = path
        package = str(Path(__file__).parents[2])
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for start, stop in ranges:
                job = json.dumps({"path": str(Path(path).absolute()), "start": start, "stop": stop, **asdict(keys)})
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, job], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
                )
                self._processes.append(process)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> ScanProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def results(self) -> list[RangeScan]:
        """What each found, in the order of the ranges. Raises DataError if one ends without an answer."""
        deadline = time.monotonic() + TIMEOUT_S
        found = []
        for process in self._processes:
            try:
                answer, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise DataError(f"the rows were not read within {TIMEOUT_S:g} s", where=self._path) from None
            if process.returncode:
                said = errors.decode(errors="replace").strip().splitlines()[-1:] or [f"status {process.returncode}"]
                raise DataError(f"a process that read the file ended: {said[0]}", where=self._path)
            found.append(_unpacked(answer))
        return found

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def main(argv: Sequence[str] | None = None) -> int:
    """Scan one range and write what was found."""
    (text,) = sys.argv[1:] if argv is None else argv
    job: dict[str, Any] = json.loads(text)
    path, start, stop = (job.pop(name) for name in ("path", "start", "stop"))
    keys = RowKeys(**{**job, "multimodal": tuple((media, name) for media, name in job["multimodal"])})
    with open(path, "rb", buffering=1 << 20) as file:
        sys.stdout.buffer.write(_packed(scan_range(file, start, stop, keys)))
    return 0


def _packed(scan: RangeScan) -> bytes:
    facts = {
        name: getattr(scan, name) for name in ("num_lines", "num_problems", "problems", "jumps", "rewards", "has_label")
    }
    text = json.dumps({**facts, "media": sorted(scan.media)}).encode()
    arrays = (scan.offsets, scan.id_rows, scan.id_hashes)
    return b"".join([_HEADER.pack(len(text), *map(len, arrays)), text, *(array.tobytes() for array in arrays)])


def _unpacked(answer: bytes) -> RangeScan:
    length, *counts = _HEADER.unpack_from(answer)
    position = _HEADER.size + length
    facts = json.loads(answer[_HEADER.size : position])
    arrays = []
    for count, dtype in zip(counts, (np.int64, np.int64, np.uint64), strict=True):
        arrays.append(np.frombuffer(answer, dtype, count, position))
        position += count * 8
    for name in ("problems", "jumps"):
        facts[name] = [(number, other) for number, other in facts[name]]
    facts["media"] = set(facts["media"])
    return RangeScan(offsets=arrays[0], id_rows=arrays[1], id_hashes=arrays[2], **facts)


if __name__ == "__main__":
    sys.exit(main())
