"""Groups that wait to be leased, in the order in which they were admitted.

A group is admitted when it is leased for the first time, and keeps its number: whatever comes back takes its old
place, before everything that was admitted later.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from buffer_rl.types import GroupUid, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A group with its running number."""

    group: SampleGroup
    number: int


class GroupQueue:
    """Iterates over the groups, the next one first."""

    def __init__(self, groups: Iterable[SampleGroup] = ()) -> None:
        self._entries = [Admitted(group=group, number=number) for number, group in enumerate(groups)]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[SampleGroup]:
        return (entry.group for entry in self._entries)

    @property
    def entries(self) -> Sequence[Admitted]:
        """The groups with their numbers."""
        return tuple(self._entries)

    def first(self, num_groups: int, chosen: Sequence[GroupUid] | None = None) -> list[Admitted]:
        """The next groups, or those of ``chosen`` that are here, in its order; at most ``num_groups``. They stay."""
        if chosen is None:
            return self._entries[:num_groups]
        by_uid = {entry.group.uid: entry for entry in self._entries}
        return [by_uid[uid] for uid in list(dict.fromkeys(chosen))[:num_groups] if uid in by_uid]

    def remove(self, uids: Collection[GroupUid]) -> None:
        """Take groups out; those that are not here are passed over."""
        gone = set(uids)
        self._entries = [entry for entry in self._entries if entry.group.uid not in gone]

    def put(self, entry: Admitted) -> None:
        """Put a group at the place of its number."""
        bisect.insort(self._entries, entry, key=lambda other: other.number)
