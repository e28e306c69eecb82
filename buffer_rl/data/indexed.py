"""Large JSONL files: validated by several processes, or not at all where the index knows them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np

from buffer_rl.data import files
from buffer_rl.data.index import DataIndex, Identity, IndexEntry, now_ns
from buffer_rl.data.lazy_rows import LazyRows
from buffer_rl.data.row import RowKeys
from buffer_rl.data.scan import MAX_PROBLEMS, RangeScan, scan_range
from buffer_rl.data.scan_process import ScanProcesses
from buffer_rl.errors import DataError

SourceHash = Callable[["hashlib._Hash", int], str]
"""The source hash from the digest of the file's bytes and the number of rows."""
Problems = list[tuple[int, str]]
"""Lines from 1, and what is wrong in them."""
_HASH_BLOCK = 1 << 20


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
        checked_ns = now_ns()
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
    checked_ns = now_ns()
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
    offsets = np.concatenate([scan.offsets for scan in scans])
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
    id_rows = np.concatenate([scan.id_rows + row for row, scan in zip(before, scans, strict=True)])
    hashes = np.concatenate([scan.id_hashes for scan in scans])
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
