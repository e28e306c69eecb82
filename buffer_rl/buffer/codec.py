"""Groups as JSON values, for the Buffer's saved queue: prompts, and responses where the queue keeps them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from buffer_rl.types import GroupUid, Sample, SampleGroup, Status, VersionSpan

_BYTES = "buffer_rl:base64"  # the only key of a mapping that stands for bytes
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
    return fields


def _sample_from_json(uid: GroupUid, fields: Mapping[str, Any]) -> Sample:
    names = (*_PROMPT_FIELDS, *_RESPONSE_FIELDS) if "status" in fields else _PROMPT_FIELDS
    sample = Sample(uid=uid, **{name: _unpack(fields[name]) for name in names if name in fields})
    if "status" in fields:
        sample.status = Status(fields["status"])
        sample.weight_versions = [VersionSpan(*span) for span in fields["weight_versions"]]
    return sample


def _pack(value: Any) -> Any:
    """The value with bytes, which multimodal inputs may hold, as ``{_BYTES: base64 text}``."""
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode("ascii")}
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
        return {key: _unpack(item) for key, item in value.items()}
    return value
