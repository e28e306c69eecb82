"""Which of the finished groups one step trains on.

A ticket is a batch of admissions: what a rollout function may lease. A selection is what a step trains on. In lockstep
and pipelined runs both open with ``generate`` and end with ``close_rollout``: the groups that finish under the ticket
join its selection. A final reader may take the first P of them, and what it took is pinned: its effect cannot be
undone. When the selection closes, the pinned groups and then those leased first are chosen, whatever finished first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from buffer_rl.records.groups import GroupUid


class Selection:
    """The groups of one step, or of one evaluation: open while groups join it, then closed.

    num_groups: P, how many it takes; None where all that join are chosen (an evaluation).
    """

    def __init__(self, num_groups: int | None) -> None:
        self.num_groups = num_groups
        self.closed = False
        self._joined: dict[GroupUid, int] = {}  # with the place of its lease among all leases
        self._withdrawn: set[GroupUid] = set()
        self._uids: list[GroupUid] = []  # sorted once it is closed

    def __contains__(self, uid: GroupUid) -> bool:
        return uid in self._joined

    def __len__(self) -> int:
        return len(self._joined)

    @property
    def joined(self) -> Iterable[GroupUid]:
        """Its groups, in the order in which they joined."""
        return self._joined

    @property
    def uids(self) -> list[GroupUid]:
        """Its groups, sorted."""
        return self._uids if self.closed else sorted(self._joined)

    @property
    def num_slots(self) -> int:
        """How many groups of the budget it holds: P while it is open, whatever is leased for it; then its groups."""
        return len(self) if self.closed or self.num_groups is None else self.num_groups

    def join(self, uid: GroupUid, order: int) -> None:
        """A finished group. order: the place of its lease among all leases."""
        assert not self.closed, "the selection is closed"
        self._joined[uid] = order

    def choose(self, pinned: Collection[GroupUid]) -> tuple[list[GroupUid], list[GroupUid]]:
        """What it would be closed with, the ``pinned`` groups and then those leased first, and the surplus. Changes
        nothing."""
        ordered = sorted(self._joined, key=lambda uid: (uid not in pinned, self._joined[uid]))
        wanted = len(ordered) if self.num_groups is None else self.num_groups
        return ordered[:wanted], ordered[wanted:]

    def close(self, chosen: Sequence[GroupUid]) -> list[GroupUid]:
        """Fix its groups, those of ``chosen``. Returns the others, which leave it."""
        kept = set(chosen)
        surplus = [uid for uid in self._joined if uid not in kept]
        for uid in surplus:
            del self._joined[uid]
        self._withdrawn.update(surplus)
        self._uids = sorted(self._joined)
        self.closed = True
        return surplus

    def is_withdrawn(self, uid: GroupUid) -> bool:
        """Whether the group had joined and was not chosen."""
        return uid in self._withdrawn
