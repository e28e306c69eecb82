"""Ledgers that are wrong on purpose. Whatever harness finds no fault in them is itself at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from buffer_rl.buffer.ledger import LedgerEntry, trained
from buffer_rl.buffer.sqlite_ledger import SqliteLedger
from buffer_rl.types import GroupUid


class SplitCommit(SqliteLedger):
    """Commits in two transactions: the groups, and then that the rollout is committed."""

    def commit(self, uids: Iterable[GroupUid], rollout_id: int, step: int) -> None:
        """See ``Ledger.commit``."""
        chosen = list(uids)
        with self.transaction():
            for uid in chosen:
                admitted, entry = self._tables.find(uid)
                self._tables.write(uid, admitted, entry, trained(uid, entry, rollout_id, step))
        with self.transaction():
            self._tables.record_commit(rollout_id, step, len(chosen))


class KeptLeases(SqliteLedger):
    """Leaves the leases of a Buffer that died as they are."""

    def _return_leases(self, reason: str, keep_selected: bool) -> int:
        return 0


class AnyIncarnation(SqliteLedger):
    """Takes reports for their attempt alone, whichever incarnation leased the group."""

    def _report(self, uid: GroupUid, incarnation: str | None, rule: Callable[[LedgerEntry], LedgerEntry]) -> None:
        self._change(uid, rule)


MUTANTS: dict[str, type[SqliteLedger]] = {
    "split-commit": SplitCommit,
    "kept-leases": KeptLeases,
    "any-incarnation": AnyIncarnation,
}
