"""The queue: groups that were admitted and wait to be leased again, in the order of their admission."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from buffer_rl.buffer.partial import RequeueRule, oldest_version
from buffer_rl.records.groups import GroupUid, QueueHeader, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A group with its running number."""

    group: SampleGroup
    number: int


class GroupQueue:
    """Groups in the order of their numbers. What is leased from it and put back costs the same however many wait."""

    def __init__(self, groups: Iterable[SampleGroup] = ()) -> None:
        self._entries = {group.uid: Admitted(group=group, number=number) for number, group in enumerate(groups)}
        # May also hold groups that were taken out: those are passed over where they come first.
        self._order = [(entry.number, uid) for uid, entry in self._entries.items()]

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Admitted]:
        """All groups with their numbers, the next one first."""
        return sorted(self._entries.values(), key=lambda entry: entry.number)

    def first(self, num_groups: int, chosen: Sequence[GroupUid] | None = None) -> list[Admitted]:
        """The next groups, or those of ``chosen`` that are here, in its order; at most ``num_groups``. They stay."""
        if chosen is not None:
            return [self._entries[uid] for uid in dict.fromkeys(chosen) if uid in self._entries][:num_groups]
        found: dict[GroupUid, Admitted] = {}
        while self._order and len(found) < num_groups:
            number, uid = heapq.heappop(self._order)
            if (entry := self._entries.get(uid)) is not None and entry.number == number:
                found[uid] = entry
        for uid, entry in found.items():
            heapq.heappush(self._order, (entry.number, uid))
        return list(found.values())

    def remove(self, uids: Iterable[GroupUid]) -> None:
        """Take groups out; those that are not here are passed over."""
        for uid in uids:
            self._entries.pop(uid, None)
        if len(self._order) > 2 * len(self._entries) + 64:  # mostly groups that were taken out
            self._order = [(entry.number, entry.group.uid) for entry in self.entries]  # sorted, which is a heap

    def put(self, entry: Admitted) -> None:
        """Put a group at the place of its number."""
        self._entries[entry.group.uid] = entry
        heapq.heappush(self._order, (entry.number, entry.group.uid))

    def headers(self, rule: RequeueRule) -> list[QueueHeader]:
        """What a buffer filter sees of all groups, the next one first. rule: knows their rewards."""
        return [_header(entry.group, rule) for entry in self.entries]


def _header(group: SampleGroup, rule: RequeueRule) -> QueueHeader:
    prompt = group[0].prompt
    text = prompt if isinstance(prompt, str) else "".join(str(turn) for turn in prompt)
    return QueueHeader(
        uid=group.uid,
        admitted=group[0].group_index or 0,
        prompt_length=len(text),
        attempts=group.attempt,
        reward=rule.reward(group),
        version=oldest_version(group),
    )
