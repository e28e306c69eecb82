"""Groups as JSON values, for the Buffer's saved queue. Prompts alone: responses do not survive a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from buffer_rl.types import GroupUid, Sample, SampleGroup

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
        "samples": [{name: getattr(sample, name) for name in _PROMPT_FIELDS} for sample in group.as_prompts()],
    }


def group_from_json(state: Mapping[str, Any]) -> SampleGroup:
    """The inverse of ``group_to_json``."""
    uid = GroupUid.parse(state["uid"])
    samples = [Sample(uid=uid, **fields) for fields in state["samples"]]
    return SampleGroup(uid=uid, samples=samples, attempt=state["attempt"])
