"""Windows of the Buffer, each with one rule broken: a run with one of them does not keep the bound."""

from __future__ import annotations

from buffer_rl.buffer.window import Window
from buffer_rl.records.groups import GroupUid


class OldPlace(Window):
    """A group that is leased again gets its old place."""

    def __init__(self, groups_per_step: int, size: int) -> None:
        super().__init__(groups_per_step, size)
        self._first: dict[GroupUid, int] = {}

    def lease(self, uid: GroupUid) -> None:
        super().lease(uid)
        self._first.setdefault(uid, len(self._first))
        self._places = dict(sorted(self._places.items(), key=lambda item: self._first[item[0]]))


class Forgetful(Window):
    """Passes are forgotten with each selection."""

    def take(self, chosen: list[GroupUid]) -> None:
        super().take(chosen)
        for place in self._places.values():
            place.passed = 0


class Greedy(Window):
    """Takes the oldest finished groups, whatever they pass."""

    def choose(self, num_groups: int | None = None) -> list[GroupUid] | None:
        wanted = self._groups_per_step if num_groups is None else num_groups
        found = [uid for uid, place in self._places.items() if place.finished][:wanted]
        return found if len(found) == wanted else super().choose(num_groups)
