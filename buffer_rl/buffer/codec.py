"""Groups as JSON values, for the Buffer's saved queue: prompts, and responses where the queue keeps them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Status, VersionSpan
from buffer_rl.records.sample import OF_SLIME, RenderedPrompt

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
    raise RolloutError(
        f"it is of type {type(value).__module__}.{type(value).__qualname__}, and the group goes back to the queue",
        where=where,
        expected="what JSON holds, bytes, arrays or tensors of numbers",
        hint="delete the attribute before the group is given back, or keep it outside of the sample",
    )


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
