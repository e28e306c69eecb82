"""Identities: of a prompt group, of a training row, and of the weights that sampled a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class GroupUid:
    """Identity of one prompt group: which data source, which of its rows, in which epoch."""

    source: str
    row: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.source}:{self.row}:{self.epoch}"

    def __reduce__(self) -> tuple[Any, ...]:  # several times faster than the one that dataclasses write
        return GroupUid, (self.source, self.row, self.epoch)

    @classmethod
    def parse(cls, text: str) -> GroupUid:
        """The inverse of ``str(uid)``. Raises ``ValueError`` for anything else."""
        source, row, epoch = text.rsplit(":", 2)
        return cls(source, int(row), int(epoch))


NO_UID = GroupUid("", 0, 0)
"""Of a group that the rollout function made without one; the framework gives it one when it is reported."""


@dataclass(frozen=True, slots=True, order=True)
class RowId:
    """Identity of one training row: the group, which of its samples, which part of a sample that fanned out."""

    uid: GroupUid
    sample_index: int
    part: int = 0

    def __str__(self) -> str:
        return f"{self.uid}/{self.sample_index}.{self.part}"

    def __reduce__(self) -> tuple[Any, ...]:
        return RowId, (self.uid, self.sample_index, self.part)

    def __hash__(self) -> int:  # without a second call for the uid: a step takes thousands
        return hash((self.uid.row, self.uid.epoch, self.sample_index, self.part))


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens ``start`` to ``end`` (exclusive, counted from the first response token) were sampled
    by weights of ``version``."""

    version: int
    start: int
    end: int

    def __reduce__(self) -> tuple[Any, ...]:
        return VersionSpan, (self.version, self.start, self.end)


def tile(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether the spans, in order, cover the tokens 0 to ``length`` once each, and none of them is empty."""
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            return False
        end = span.end
    return end == length


NO_VERSION = -1
"""Of weights that no run has published; no ticket accepts it."""


def version_number(name: Any) -> int:
    """The number of a weight version; ``NO_VERSION`` of weights that no run has published, such as "default"."""
    return int(name) if str(name).isdecimal() else NO_VERSION
