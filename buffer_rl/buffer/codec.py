"""How groups, columns and row ids are encoded: as JSON values in the Buffer's saved queue, and between processes.

The saved queue has the prompts of groups, and responses if the queue keeps them.

Ray ships every array of a call by itself, which costs more than the bytes of a short one: a step of 64 rows and 10
fields is 400 arrays. So ``Columns`` join the rows of a field before they are sent, small fields travel inside the
message, and the receiver gets views of one array, with the values, dtypes and shapes of the sent ones. Ids of rows
travel as the numbers in them, since every object of a class of ours costs a call of Ray's pickler.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import Column, GroupUid, RowId, Sample, SampleGroup, Status, VersionSpan
from buffer_rl.records.sample import OF_SLIME, RenderedPrompt

IN_MESSAGE_BYTES = 1 << 18
"""Smaller fields are copied into the message: about as long as shipping one array by itself takes."""

_Joined = tuple[np.ndarray | bytes, Any, tuple[int, ...], list[int] | None]
"""A column as one array: the array, or its bytes; its dtype and shape; where each row ends, of a column that is a
list."""

_BYTES = "buffer_rl:base64"  # the only key of a mapping that stands for bytes
_ARRAY = "buffer_rl:array"  # likewise for an array: its dtype, shape and bytes as base64 text
_PROMPT_FIELDS = (
    "sample_index",
    "group_index",
    "index",
    "prompt",
    "multimodal_inputs",
    "label",
    "metadata",
    "session_id",
)
_RESPONSE_FIELDS = (
    "part",
    "tokens",
    "response",
    "response_length",
    "reward",
    "loss_mask",
    "rollout_log_probs",
    "teacher_log_probs",
    "rollout_kept_tokens",
    "remove_sample",
    "train_metadata",
)


def group_to_json(group: SampleGroup) -> dict[str, Any]:
    """JSON values from which ``group_from_json`` rebuilds the group."""
    return {"uid": str(group.uid), "attempt": group.attempt, "samples": [_sample_to_json(s) for s in group]}


def group_from_json(state: Mapping[str, Any]) -> SampleGroup:
    """The inverse of ``group_to_json``."""
    uid = GroupUid.parse(state["uid"])
    samples = [_sample_from_json(uid, fields) for fields in state["samples"]]
    return SampleGroup(uid=uid, samples=samples, attempt=state["attempt"])


def _sample_to_json(sample: Sample) -> dict[str, Any]:
    fields = {name: _pack(getattr(sample, name)) for name in _PROMPT_FIELDS}
    if sample.response_length:
        fields |= {name: _pack(getattr(sample, name)) for name in _RESPONSE_FIELDS}
        fields["status"] = str(sample.status)
        fields["weight_versions"] = [[span.version, span.start, span.end] for span in sample.weight_versions]
    if added := added_attributes(sample):
        fields["attributes"] = _pack(added)
    return fields


def added_attributes(sample: Sample) -> dict[str, Any]:
    """The user's own attributes, and of a sample with a response the fields of slime's that are set."""
    added = sample.own_attributes()
    if sample.response_length:
        values = sample.__dict__
        added |= {name: value for name in OF_SLIME if (value := values[name]) is not None}
        if sample.non_generation_time:
            added["non_generation_time"] = sample.non_generation_time
    return added


def for_queue(groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """The groups as a queue can hold them, in place. The samples' added attributes become values of JSON, bytes, and
    arrays of numbers, which tensors become: the Buffer never loads a class of the user's. A rendered prompt becomes
    what it was rendered from.

    Raises RolloutError, naming the attribute, for anything else."""
    for group in groups:
        for sample in [] if group.is_fresh else group:
            if isinstance(sample.prompt, RenderedPrompt):
                sample.prompt = sample.prompt.source
            for name, value in added_attributes(sample).items():
                sample.__dict__[name] = _plain(value, f"row {sample.row_id}: sample.{name}")
    return list(groups)


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(item, where) for key, item in value.items()}
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu().numpy()
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value
    what = f"it is of type {type(value).__module__}.{type(value).__qualname__}, and the group goes back to the queue"
    hint = "delete the attribute before the group is given back, or keep it outside of the sample"
    raise RolloutError(what, where=where, expected="what JSON holds, bytes, arrays or tensors of numbers", hint=hint)


def _sample_from_json(uid: GroupUid, fields: Mapping[str, Any]) -> Sample:
    names = (*_PROMPT_FIELDS, *_RESPONSE_FIELDS) if "status" in fields else _PROMPT_FIELDS
    sample = Sample(uid=uid, **{name: _unpack(fields[name]) for name in names if name in fields})
    if "status" in fields:
        sample.status = Status(fields["status"])
        sample.weight_versions = [VersionSpan(*span) for span in fields["weight_versions"]]
    sample.__dict__.update(_unpack(fields.get("attributes", {})))
    return sample


def _pack(value: Any) -> Any:
    """The value with bytes, which multimodal inputs may hold, as ``{_BYTES: base64 text}``, and arrays likewise."""
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.ndarray):
        return {_ARRAY: [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode("ascii")]}
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key is no text")
        return {key: _pack(item) for key, item in value.items()}
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        if set(value) == {_ARRAY}:
            dtype, shape, text = value[_ARRAY]
            return np.frombuffer(base64.b64decode(text), dtype=dtype).reshape(shape).copy()
        return {key: _unpack(item) for key, item in value.items()}
    return value


class Columns(dict[str, Any]):
    """Columns by name, which travel joined. A value that is no column, such as a ``Cell``, travels as it is."""

    def __reduce__(self) -> tuple[Any, ...]:
        joined = {name: sent for name, column in self.items() if (sent := _joined(column)) is not None}
        return _arrived_columns, ({name: None if name in joined else c for name, c in self.items()}, joined)


def _arrived_columns(columns: Mapping[str, Any], joined: Mapping[str, _Joined]) -> Columns:
    return Columns((name, _cut(*joined[name]) if name in joined else value) for name, value in columns.items())


class RowIds(list[RowId]):
    """Ids of rows. They arrive as a list."""

    def __reduce__(self) -> tuple[Any, ...]:
        runs = [(uid, list(rows)) for uid, rows in groupby(self, key=lambda row: row.uid)]
        numbers = [
            (uid.source, uid.row, uid.epoch, [row.sample_index for row in rows], [row.part for row in rows])
            for uid, rows in runs
        ]
        return _arrived_rows, (numbers,)


def _arrived_rows(runs: Sequence[tuple[str, int, int, list[int], list[int]]]) -> list[RowId]:
    return [
        RowId(uid, index, part)
        for source, number, epoch, indices, parts in runs
        for uid in (GroupUid(source, number, epoch),)
        for index, part in zip(indices, parts, strict=True)
    ]


def stacked(blocks: Sequence[Column]) -> Column | None:
    """The rows of all ``blocks`` as one column, which can be cut again; None where they are of different kinds."""
    if all(isinstance(block, list) for block in blocks):
        return [row for block in blocks for row in block]
    return np.concatenate(blocks) if are_alike(blocks) else None


def _joined(column: Any) -> _Joined | None:
    """A column, with its rows joined where it is a list of arrays of one kind; None for what travels as it is."""
    ends = None
    if isinstance(column, list):
        if not are_alike(column):
            return None
        column, ends = np.concatenate(column), list(accumulate(map(len, column)))
    if type(column) is not np.ndarray or column.dtype.hasobject:
        return None
    dtype = column.dtype.str if column.dtype.isbuiltin == 1 else column.dtype
    data = column.tobytes() if column.nbytes < IN_MESSAGE_BYTES else column
    return data, dtype, column.shape, ends


def _cut(data: np.ndarray | bytes, dtype: Any, shape: tuple[int, ...], ends: list[int] | None) -> Column:
    """The inverse of ``_joined``."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=dtype).reshape(shape)
    if ends is None:
        return array
    return [array[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def are_alike(parts: Sequence[Any]) -> bool:
    """Whether ``parts`` are arrays that can be joined along their first axis, and cut again, without a change.

    Not those of a subclass, such as masked arrays, nor those whose dtype joining changes."""
    if set(map(type, parts)) != {np.ndarray}:
        return False
    dtype, shape = parts[0].dtype, parts[0].shape[1:]
    if dtype.hasobject or dtype.fields is not None or not dtype.isnative:
        return False
    return {part.dtype for part in parts} == {dtype} and all(
        part.ndim > 0 and part.shape[1:] == shape for part in parts
    )
