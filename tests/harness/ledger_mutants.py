"""Ledgers that are wrong on purpose. Whatever harness finds no fault in them is itself at fault."""

from __future__ import annotations

from collections.abc import Iterable
from unittest.mock import patch

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import trained
from buffer_rl.records.groups import GroupUid


class SplitCommit(Ledger):
    """Commits in two transactions: the groups, and then that the rollout is committed."""

    def commit(self, uids: Iterable[GroupUid], rollout_id: int, step: int) -> None:
        chosen = list(uids)
        with self.transaction():
            for uid in chosen:
                admitted, entry = self.tables.find(uid)
                self.tables.write(uid, admitted, entry, trained(uid, entry, rollout_id, step))
        with self.transaction():
            self.tables.record_commit(rollout_id, step, len(chosen))


class KeptLeases(Ledger):
    """Leaves the leases of a Buffer that died as they are."""

    def _renew_token(self, reason: str, keep_selected: bool) -> None:
        with patch.object(self.tables, "return_leases", lambda *_: None):
            super()._renew_token(reason, keep_selected)


class SameToken(Ledger):
    """Keeps its fencing token where it is opened again or replaced."""

    def _renew_token(self, reason: str, keep_selected: bool) -> None:
        former = self.tables.fact("incarnation")
        super()._renew_token(reason, keep_selected)
        if former is not None:
            self.fencing_token = former
            self.tables.set_fact("incarnation", former)


MUTANTS: dict[str, type[Ledger]] = {
    "split-commit": SplitCommit,
    "kept-leases": KeptLeases,
    "same-token": SameToken,
}
