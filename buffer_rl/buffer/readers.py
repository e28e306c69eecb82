"""What one reading task of a pool was handed, and what waits for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from buffer_rl.buffer.samplers import ReadyGroup, Request, sampler_named
from buffer_rl.types import GroupUid


class Reader:
    """A named task that reads ``fields`` of every group, each group once, as soon as those fields are there, and adds
    ``produces`` to it.

    sampler: which groups it is handed; raises BufferStateError for an unknown name (see ``samplers``).
    is_final: what it was handed is part of the step from then on, because its effect cannot be undone.
    generation: how often its process was replaced.
    """

    def __init__(
        self,
        name: str,
        fields: frozenset[str],
        produces: frozenset[str],
        sampler: str = "group",
        *,
        is_final: bool = False,
    ) -> None:
        self.name = name
        self.fields = fields
        self.produces = produces
        self.is_final = is_final
        self.generation = 0
        self.sampler = sampler
        self._sampler = sampler_named(sampler)
        self._ready: OrderedDict[GroupUid, ReadyGroup] = OrderedDict()
        self._offered: dict[GroupUid, ReadyGroup] = {}
        self._handed: dict[GroupUid, None] = {}

    def offer(self, uid: GroupUid, tokens: list[int]) -> bool:
        """All fields of the group are there. False if it was offered before."""
        if uid in self._offered:
            return False
        self._offered[uid] = self._ready[uid] = ReadyGroup(uid=uid, tokens=tokens)
        return True

    def take(self, request: Request, closed: bool) -> list[GroupUid]:
        """The next groups for the request, none if there are not enough yet; they count as handed out."""
        uids = self._sampler.take(self._ready, request, closed)
        self._handed.update((uid, None) for uid in uids)
        return uids

    @property
    def num_offered(self) -> int:
        """Groups that were offered, handed out or not."""
        return len(self._offered)

    def is_done(self, request: Request, all_offered: bool) -> bool:
        """Whether nothing will come for the request's rank any more. all_offered: every group of the closed pool was
        offered."""
        return all_offered and not self._ready and not self._sampler.holds_back(request)

    def handed(self) -> list[GroupUid]:
        """The groups that were handed out, in that order."""
        return list(self._handed)

    def withdraw(self, uids: Iterable[GroupUid]) -> None:
        """These groups left the pool."""
        gone = set(uids)
        self._sampler.withdraw(gone)
        for uid in gone:
            self._offered.pop(uid, None)
            self._ready.pop(uid, None)
            self._handed.pop(uid, None)

    def offer_again(self, uids: Iterable[GroupUid]) -> int:
        """Hand these groups out once more: whoever had them is replaced. Returns how many there are."""
        self.generation += 1
        again = [uid for uid in uids if uid in self._handed]
        for uid in reversed(again):
            del self._handed[uid]
            self._ready[uid] = self._offered[uid]
            self._ready.move_to_end(uid, last=False)
        return len(again)
