"""Which finished groups a step of an asynchronous run takes, so that no token is older than the bound.

A group is live from its lease until a step takes it, or until it is rejected or requeued; its place is that of its
newest lease. A step takes the P oldest finished live groups, if no live group is then passed by younger ones more than
W - 1 times, over all steps together. Nothing is dropped.

Bound. Let a group be leased while version v is published, with at most (S + 1) P groups unreleased. Then at most
(S + 1) P - 1 are before it, all of steps from v on; at most W - 1 younger ones pass it; each step takes P. So it is in
step v + floor(((S + 1) P + W - 2) / P) at the latest, which is v + M with W = 1 + (M - S) P.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from buffer_rl.records.groups import GroupUid


@dataclass(slots=True)
class _Place:
    """finished: whether the group can be taken. passed: how many younger groups were taken before it."""

    finished: bool = False
    passed: int = 0


class Window:
    """The live groups, in the order of their leases.

    groups_per_step: P. size: W; with 1, groups are taken in exactly the order of their leases.

    Example:
        one, two, three = (GroupUid(source="5c1f0a9be3d2", row=row, epoch=0) for row in (1, 2, 3))
        window = Window(groups_per_step=1, size=2)
        for uid in (one, two, three):
            window.lease(uid)
        window.finish(three)
        assert window.choose() == [three]  # which passes one and two
        window.take([three])
        window.finish(two)
        assert window.choose() is None  # one would be passed twice
    """

    def __init__(self, groups_per_step: int, size: int) -> None:
        self._groups_per_step = groups_per_step
        self._size = size
        self._places: dict[GroupUid, _Place] = {}
        self.num_finished = 0  # live groups that can be taken

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, uid: GroupUid) -> bool:
        return uid in self._places

    @property
    def num_passed(self) -> int:
        """The largest number of younger groups that passed one live group."""
        return max((place.passed for place in self._places.values()), default=0)

    def lease(self, uid: GroupUid) -> None:
        """A group is live, as the youngest."""
        assert uid not in self._places, "a live group is not leased"
        self._places[uid] = _Place()

    def finish(self, uid: GroupUid) -> None:
        """A live group can be taken."""
        self._places[uid].finished = True
        self.num_finished += 1

    def leave(self, uid: GroupUid) -> None:
        """A group is rejected, requeued or lost; one that is not live is ignored."""
        if (place := self._places.pop(uid, None)) is not None:
            self.num_finished -= place.finished

    def certain(self) -> list[GroupUid]:
        """Finished groups with fewer than P live ones before them. Whatever comes, the next step takes them: a new
        lease is behind them, and a group that leaves brings them forward."""
        return [uid for uid, place in islice(self._places.items(), self._groups_per_step) if place.finished]

    def choose(self, num_groups: int | None = None) -> list[GroupUid] | None:
        """The groups that the next step takes, oldest first; None if there are too few, or one would be passed too
        often. num_groups: how many, by default P; for a short step all that are live. Changes nothing."""
        wanted = self._groups_per_step if num_groups is None else num_groups
        if self.num_finished < wanted:
            return None
        chosen: list[GroupUid] = []
        for uid, place in self._places.items():
            if len(chosen) == wanted:
                break
            if place.finished:
                chosen.append(uid)
            elif place.passed + wanted - len(chosen) > self._size - 1:
                return None
        return chosen

    def take(self, chosen: list[GroupUid]) -> None:
        """A step takes groups of ``choose``: they are live no longer, and have passed all that are before them."""
        left = len(chosen)
        taken = set(chosen)
        for uid, place in self._places.items():
            if not left:
                break
            if uid in taken:
                left -= 1
            else:
                place.passed += left
        for uid in chosen:
            self.leave(uid)

    def empty(self) -> Window:
        """A window of the same size without groups."""
        return Window(self._groups_per_step, self._size)
