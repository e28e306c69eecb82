"""What a ledger says of its tickets and selections, and of the rollout that a group left."""

from __future__ import annotations

from pathlib import Path

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit, SelectionFacts, TicketCounts
from buffer_rl.records.groups import GroupUid

A, B, C, D = (GroupUid("data", row, 0) for row in range(4))
FOREIGN = GroupUid("my-env", 0, 0)


def audit_of(folder: Path) -> LedgerAudit:
    return LedgerAudit(folder / "ledger.sqlite")


def left(folder: Path, uid: GroupUid) -> list[tuple[str, int | None, str]]:
    """From which state, which rollout and why a group went back to pending."""
    lines = audit_of(folder).history(uid)
    return [(line.before.value, line.rollout_id, line.reason) for line in lines if line.after == "pending"]


def new_ledger(folder: Path, keep_selected: bool = False) -> Ledger:
    return Ledger(folder / "ledger.sqlite", run="r", keep_selected=keep_selected)


def test_a_line_back_to_pending_names_the_rollout_that_the_group_left(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    for uid in (A, B, C, D):
        ledger.lease(uid, 0)
    ledger.requeue(A, 1)
    for uid in (B, C):
        ledger.finish(uid, 1)
    ledger.requeue(B, 1)
    ledger.select([C], 5)  # groups of one ticket, in the selection of another rollout
    ledger.requeue(C, 1)
    ledger.lease(A, 6)
    assert [ledger.entry(uid).rollout_id for uid in (A, B, C, D)] == [6, None, None, 0]
    ledger.close()
    new_ledger(tmp_path).close()
    assert left(tmp_path, A) == [("leased", 0, ""), ("leased", 6, "restart")]
    assert left(tmp_path, B) == [("finished", 0, "")]
    assert left(tmp_path, C) == [("finished", 5, "")]
    assert left(tmp_path, D) == [("leased", 0, "restart")]


def test_leases_count_for_their_ticket_whatever_selection_their_groups_join(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    for uid in (A, B):
        ledger.lease(uid, 3)
        ledger.finish(uid, 1)
    ledger.lease(C, 3)
    ledger.reject(C, 1, "zero_std")
    ledger.lease(D, 4)
    ledger.finish(D, 1)
    ledger.lease(FOREIGN, 4, foreign=True)
    ledger.finish(FOREIGN, 1)
    ledger.select([A, D], 7)
    ledger.commit([A, D], 7, 8)
    ledger.select([B, FOREIGN], 9)
    ledger.requeue(B, 1)
    ledger.lease(B, 4)
    ledger.quarantine(B, 2, "poison")
    ledger.close()
    new_ledger(tmp_path, keep_selected=True).close()
    audit = audit_of(tmp_path)
    third = TicketCounts(rollout_id=3, leased=3, finished=2, requeued=1, rejected=1, quarantined=0)
    fourth = TicketCounts(rollout_id=4, leased=3, finished=2, requeued=0, rejected=0, quarantined=1)
    assert audit.tickets() == [fourth, third]
    assert audit.tickets(limit=1) == [fourth]
    trained = SelectionFacts(rollout_id=7, num_groups=2, step=8, tickets=[3, 4])
    waiting = SelectionFacts(rollout_id=9, num_groups=1, step=None, tickets=[4])
    assert audit.selections() == [waiting, trained]
    assert audit.selections(limit=1) == [waiting]
    new_ledger(tmp_path).close()  # the trainer's payloads are gone: nothing is selected
    assert audit.selections() == [trained]
    assert [counts.requeued for counts in audit.tickets()] == [1, 1]
    assert left(tmp_path, FOREIGN) == [("finished", 9, "restart")]


def test_a_group_that_is_leased_again_counts_for_both_tickets_and_is_trained_of_the_last(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    for attempt, ticket in ((1, 0), (2, 0), (3, 1)):
        ledger.lease(A, ticket)
        ledger.finish(A, attempt)
        if attempt < 3:
            ledger.requeue(A, attempt)
    ledger.commit([A], 1, 2)
    audit = audit_of(tmp_path)
    assert [(row.rollout_id, row.leased, row.finished, row.requeued) for row in audit.tickets()] == [
        (1, 1, 1, 0),
        (0, 2, 2, 2),
    ]
    assert audit.selections() == [SelectionFacts(rollout_id=1, num_groups=1, step=2, tickets=[1])]


def test_the_history_of_an_earlier_version_counts_for_the_same_tickets(tmp_path: Path) -> None:
    """Its lines back to pending name no rollout."""
    ledger = new_ledger(tmp_path)
    ledger.lease(A, 2)
    ledger.requeue(A, 1)
    ledger._db.execute("UPDATE history SET rollout_id = NULL WHERE to_state = 'pending'")
    (row,) = audit_of(tmp_path).tickets()
    assert (row.rollout_id, row.leased, row.requeued) == (2, 1, 1)
    assert left(tmp_path, A) == [("leased", None, "")]
