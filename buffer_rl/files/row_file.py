"""Rows of one rollout in a file.

Each column as a tensor, or as ``NAME.values`` and ``NAME.lengths`` where rows have lengths of their own along their
first dimension; row ids and
totals as JSON in the file's metadata. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from buffer_rl.errors import DataError, raised_as
from buffer_rl.records.groups import Column, GroupUid, RowId, TrainBatch

FORMAT = 1
"""Version of this layout; a reader refuses others."""


def rollout_path(template: str, rollout_id: int) -> Path:
    """``template`` with its ``{rollout_id}`` filled in."""
    return Path(template.replace("{rollout_id}", str(rollout_id)))


def write_rollout(path: Path, batch: TrainBatch) -> None:
    """Write all rows of a rollout; the file appears whole or not at all.

    Raises DataError for a column that is no array, or whose rows differ in more than their lengths."""
    tensors: dict[str, np.ndarray] = {}
    for name, column in batch.columns.items():
        tensors |= _tensors(name, column)
    header = {
        "format": FORMAT,
        "rollout_id": batch.rollout_id,
        "row_ids": [[str(row.uid), row.sample_index, row.part] for row in batch.row_ids],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    what, hint = "the rows cannot be written", "is its disk full?"
    with raised_as(DataError, what, SafetensorError, where=str(path), hint=hint):
        save_file(tensors, unfinished, metadata={"rollout": json.dumps(header)})
    unfinished.replace(path)


def read_rollout(path: Path) -> TrainBatch:
    """The inverse of ``write_rollout``. Raises DataError if the file is missing, damaged or something else."""
    if not path.is_file():
        raise DataError("no such file", where=str(path), hint="--save-debug-rollout-data writes one a rollout")
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})["rollout"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
        if header["format"] != FORMAT:
            raise DataError(f"the file has format {header['format']}", where=str(path), expected=str(FORMAT))
        row_ids = [RowId(GroupUid.parse(uid), index, part) for uid, index, part in header["row_ids"]]
        columns = _columns(tensors)
        rollout_id = header["rollout_id"]
        batch = TrainBatch(rollout_id=rollout_id, task=f"train_{rollout_id}", row_ids=row_ids, columns=columns)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"no rollout can be read from it: {error!r}", where=str(path)) from error
    for name, column in columns.items():
        if len(column) != len(row_ids):
            raise DataError(f"column {name} has {len(column)} rows for {len(row_ids)} ids", where=str(path))
    return batch


def _tensors(name: str, column: Column) -> dict[str, np.ndarray]:
    if isinstance(column, np.ndarray):
        return {name: np.ascontiguousarray(column)}
    rows = [np.asarray(row) for row in column]
    if len({row.shape[1:] for row in rows}) > 1 or any(row.ndim == 0 for row in rows):
        raise DataError(f"column {name} has rows of several shapes", where="--save-debug-rollout-data")
    lengths = np.asarray([len(row) for row in rows], dtype=np.int64)
    values = np.concatenate(rows) if rows else np.zeros(0, dtype=np.float32)
    return {f"{name}.values": values, f"{name}.lengths": lengths}


def _columns(tensors: Mapping[str, np.ndarray]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(".")
        if part == "values":
            lengths = tensors[f"{name}.lengths"]
            if int(lengths.sum()) != len(tensor):
                raise ValueError(f"{key} has {len(tensor)} values for rows of {int(lengths.sum())}")
            starts = np.cumsum(lengths) - lengths
            ranges = zip(starts.tolist(), lengths.tolist(), strict=True)
            columns[name] = [tensor[start : start + length].copy() for start, length in ranges]
        elif part != "lengths":
            columns[key] = tensor
    return columns
