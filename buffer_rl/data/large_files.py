"""Large JSONL files: validated by several processes, or not at all where the index knows them.

A process is one of its own program, ``python -m buffer_rl.data.large_files``, not a fork, which would copy Ray's and
torch's threads, and not ``multiprocessing``, which imports the caller's script again. The child reads its job as JSON
and writes JSON and arrays of numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from buffer_rl.data import files
from buffer_rl.data.dataset import RowKeys
from buffer_rl.data.index import DataIndex, Identity, IndexEntry, LazyRows
from buffer_rl.data.jsonl import MAX_PROBLEMS, RangeScan, scan_range
from buffer_rl.errors import DataError

TIMEOUT_S = 3600.0
"""Deadline of one file; a gigabyte takes one process a quarter of a minute."""
_HEADER = struct.Struct("<QQQQ")  # bytes of the JSON, and numbers of rows, of ids and of ids
SourceHash = Callable[["hashlib._Hash", int], str]
"""The source hash from the digest of the file's bytes and the number of rows."""
Problems = list[tuple[int, str]]
"""Lines from 1, and what is wrong in them."""
_HASH_BLOCK = 1 << 20


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
    for name in ("problems", "jumps"):
        facts[name] = [(number, other) for number, other in facts[name]]
    facts["media"] = set(facts["media"])
    found = RangeScan(**facts)
    for numbers, count in zip((found.offsets, found.id_rows, found.id_hashes), counts, strict=True):
        numbers.frombytes(answer[position : position + count * 8])
        position += count * 8
    return found


class BadRowsError(Exception):
    """Rows are bad: the first ones, and how many there are in all."""

    def __init__(self, problems: Problems, count: int) -> None:
        super().__init__()
        self.problems = problems
        self.count = count


def is_indexed(path: str, index: DataIndex) -> bool:
    """Whether the file is read by way of the index: a large local one, neither compressed nor in another format."""
    if files.is_remote(path) or files.uncompressed_name(path) != path or path.lower().endswith(".parquet"):
        return False
    try:
        return Path(path).is_file() and os.stat(path).st_size >= index.min_bytes
    except OSError:
        return False


def indexed_entry(path: str, keys: RowKeys, index: DataIndex, source_hash: SourceHash) -> IndexEntry:
    """The entry of a file whose rows are all good; the file is validated unless it is the same as before.

    Raises BadRowsError, and DataError for a file that cannot be read or is changed meanwhile.
    """
    try:
        identity = Identity.of(os.stat(path))
        entry = index.load(path, keys)
        if entry is not None and (found := _still_good(path, identity, entry)) is not None:
            if found is not entry:
                index.save(path, keys, found)
            return found
        checked_ns = time.time_ns()
        entry = _validated(path, keys, index, identity, checked_ns, source_hash)
        if Identity.of(os.stat(path)) != identity:
            _refuse_changed(path)
    except OSError as error:
        raise DataError(f"cannot read the file: {error.strerror}", where=path) from error
    if len(entry.offsets):
        index.save(path, keys, entry)
    return entry


def _still_good(path: str, identity: Identity, entry: IndexEntry) -> IndexEntry | None:
    """The entry, if it is of the file as it is now; brought up to date where the file's content had to say so."""
    if identity == entry.identity and entry.settled():
        return entry
    if identity.size != entry.identity.size:
        return None
    checked_ns = time.time_ns()
    if _content_hash(path).hexdigest() != entry.content_sha256:
        return None
    if Identity.of(os.stat(path)) != identity:
        _refuse_changed(path)
    return replace(entry, identity=identity, checked_ns=checked_ns)


def _validated(
    path: str, keys: RowKeys, index: DataIndex, identity: Identity, checked_ns: int, source_hash: SourceHash
) -> IndexEntry:
    with ThreadPoolExecutor(max_workers=1) as pool:  # hashing leaves the interpreter to others
        hashing = pool.submit(_content_hash, path)
        scans = _scans(path, keys, _ranges(identity.size, index))
        content = hashing.result()
    rows, lines = _starts([len(scan.offsets) for scan in scans]), _starts([scan.num_lines for scan in scans])
    problems = [
        (line + number + 1, reason) for line, scan in zip(lines, scans, strict=True) for number, reason in scan.problems
    ]
    if problems:
        raise BadRowsError(problems, sum(scan.num_problems for scan in scans))
    entry = _merged(scans, rows, lines, identity=identity, checked_ns=checked_ns, content=content, name=source_hash)
    _refuse_repeated_ids(path, keys, entry, rows, scans)
    return entry


def _merged(
    scans: Sequence[RangeScan],
    rows: Sequence[int],
    lines: Sequence[int],
    *,
    identity: Identity,
    checked_ns: int,
    content: hashlib._Hash,
    name: SourceHash,
) -> IndexEntry:
    """rows, lines: how many there are before each scan."""
    offsets = np.concatenate([np.asarray(scan.offsets) for scan in scans])
    rewards: dict[str, int] = {}
    jumps: list[tuple[int, int]] = []
    for row, line, scan in zip(rows, lines, scans, strict=True):
        jumps += [(row + number, line + other + 1) for number, other in scan.jumps]
        for reward, number in scan.rewards.items():
            rewards.setdefault(reward, row + number)
    digest = content.hexdigest()
    return IndexEntry(
        identity=identity,
        checked_ns=checked_ns,
        content_sha256=digest,
        source_hash=name(content, len(offsets)),
        offsets=offsets,
        jumps=tuple(jumps),
        rewards=rewards,
        media=frozenset[str]().union(*(scan.media for scan in scans)),
        has_label=any(scan.has_label for scan in scans),
    )


def _refuse_repeated_ids(
    path: str, keys: RowKeys, entry: IndexEntry, before: Sequence[int], scans: Sequence[RangeScan]
) -> None:
    """Raises BadRowsError where two rows have one id; rows of equal hashes are read again to see whether they do."""
    id_rows = np.concatenate([np.asarray(scan.id_rows) + row for row, scan in zip(before, scans, strict=True)])
    hashes = np.concatenate([np.asarray(scan.id_hashes) for scan in scans])
    order = np.argsort(hashes, kind="stable")  # among equals, the earlier row first
    is_later = np.concatenate(([False], hashes[order][1:] == hashes[order][:-1]))
    if not is_later.any():
        return
    first_of = np.maximum.accumulate(np.where(is_later, 0, np.arange(len(order))))
    pairs = sorted(zip(id_rows[order][is_later].tolist(), id_rows[order][first_of[is_later]].tolist(), strict=True))
    rows = LazyRows(path, keys, entry)
    problems = []
    for later, first in pairs[:MAX_PROBLEMS]:
        if (name := rows[later].id) == rows[first].id:
            problems.append((entry.line(later), f"the id {name!r} is already used in line {entry.line(first)}"))
    if problems:
        raise BadRowsError(problems, len(pairs))


def _scans(path: str, keys: RowKeys, ranges: Sequence[tuple[int, int]]) -> list[RangeScan]:
    if len(ranges) == 1:
        with open(path, "rb") as file:
            return [scan_range(file, *ranges[0], keys)]
    with ScanProcesses(path, ranges, keys) as processes:
        return processes.results()


def _ranges(size: int, index: DataIndex) -> list[tuple[int, int]]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = index.num_processes or usable
    count = max(1, min(processes, size // index.part_bytes))
    edges = [size * number // count for number in range(count + 1)]
    return list(pairwise(edges))


def _content_hash(path: str) -> hashlib._Hash:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[:-1]


def _refuse_changed(path: str) -> NoReturn:
    raise DataError("the file was changed while it was read", where=path, hint="start again when it is complete")


if __name__ == "__main__":
    sys.exit(main())
