"""A reward of one's own, for copying: partial credit for characters at their place."""

from __future__ import annotations

from typing import Any

from buffer_rl.records.groups import Sample, Status


def score(args: Any, sample: Sample) -> float:
    """The share of the label's characters that the response has at the same place; 0 if it never ended."""
    if sample.status is not Status.COMPLETED:
        return 0.0
    right = sum(a == b for a, b in zip(sample.response, sample.label, strict=False))
    return right / max(len(sample.response), len(sample.label))
