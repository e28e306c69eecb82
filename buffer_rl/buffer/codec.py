"""Groups as JSON values, for the Buffer's saved queue. Prompts alone: responses do not survive a restart."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from buffer_rl.types import GroupUid, Sample, SampleGroup

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


def group_to_json(group: SampleGroup) -> dict[str, Any]:
    """JSON values from which ``group_from_json`` rebuilds the group's prompts."""
    return {
        "uid": str(group.uid),
        "attempt": group.attempt,
        "samples": [{name: _pack(getattr(sample, name)) for name in _PROMPT_FIELDS} for sample in group.as_prompts()],
    }


def group_from_json(state: Mapping[str, Any]) -> SampleGroup:
    """The inverse of ``group_to_json``."""
    uid = GroupUid.parse(state["uid"])
    samples = [
        Sample(uid=uid, **{name: _unpack(value) for name, value in fields.items()}) for fields in state["samples"]
    ]
    return SampleGroup(uid=uid, samples=samples, attempt=state["attempt"])


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
