"""The ledger answers the same requests as a model of dicts, with the same answers and the same errors."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState, LedgerEntry
from buffer_rl.errors import BufferStateError
from buffer_rl.records.groups import GroupUid
from harness.ledger_contents import count_states, entries
from harness.memory_ledger import MemoryLedger

ROWS = 3
ALL = [GroupUid(source, row, epoch) for source in "ab" for epoch in range(2) for row in range(ROWS)]
UIDS = st.sampled_from(ALL[:5])  # few, so that requests meet
ATTEMPTS = st.integers(0, 3)
ROLLOUTS = st.integers(0, 2)
SOME = st.lists(UIDS, max_size=4)  # also twice the same
REQUESTS = st.one_of(
    st.tuples(st.just("lease"), UIDS, ROLLOUTS),
    st.tuples(st.just("lease"), UIDS, ROLLOUTS),
    st.tuples(st.sampled_from(["finish", "finish", "finish", "requeue"]), UIDS, ATTEMPTS),
    st.tuples(st.sampled_from(["reject", "quarantine"]), UIDS, ATTEMPTS, st.sampled_from(["", "why"])),
    st.tuples(st.just("select"), SOME, ROLLOUTS),
    st.tuples(st.just("commit"), SOME, ROLLOUTS, st.integers(1, 2)),
)


class Undone(Exception):
    """Ends a transaction whose transitions are not to be."""


class BothLedgers(RuleBasedStateMachine):
    """The same requests to both, with restarts, copies and transactions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.sqlite"
        self.durable = Ledger(self.path, run="r")
        self.memory = MemoryLedger()
        self.former = {self.durable.fencing_token}
        self.copy: dict[GroupUid, LedgerEntry] | None = None

    def teardown(self) -> None:
        self.durable.close()
        audit = LedgerAudit(self.path)
        assert audit.faults() == []
        assert {row.rollout_id: astuple(row)[1:] for row in audit.tickets()} == leases_by_ticket(audit)
        audit.close()
        self.folder.cleanup()

    def ask_both(self, request: tuple[Any, ...]) -> None:
        assert answer(self.durable, request) == answer(self.memory, request)

    def renews_its_token(self, change: Callable[[], None]) -> None:
        change()
        assert self.durable.fencing_token not in self.former
        self.former.add(self.durable.fencing_token)

    @rule(request=REQUESTS)
    def one_request(self, request: tuple[Any, ...]) -> None:
        self.ask_both(request)

    @rule(uids=st.lists(UIDS, unique=True, min_size=1), rollout_id=ROLLOUTS)
    def a_whole_step(self, uids: list[GroupUid], rollout_id: int) -> None:
        for uid in uids:
            self.ask_both(("lease", uid, rollout_id))
            self.ask_both(("finish", uid, self.memory.entry(uid).attempt))
        self.ask_both(("select", uids, rollout_id))
        self.ask_both(("commit", uids, rollout_id, 1))
        self.ask_both(("commit", uids, rollout_id, 1))

    @rule(requests=st.lists(REQUESTS, max_size=5))
    def a_transaction(self, requests: list[tuple[Any, ...]]) -> None:
        with self.durable.transaction():
            for request in requests:
                self.ask_both(request)

    @rule(requests=st.lists(REQUESTS, max_size=5))
    def a_transaction_that_is_given_up(self, requests: list[tuple[Any, ...]]) -> None:
        try:
            with self.durable.transaction():
                for request in requests:
                    answer(self.durable, request)
                raise Undone
        except Undone:
            pass

    @rule(value=st.sampled_from(["1", "2"]))
    def a_note(self, value: str) -> None:
        for ledger in (self.durable, self.memory):
            ledger.remember("note", value)
            assert ledger.recall("note") == value
            assert ledger.recall("another") is None

    @rule()
    def a_restart(self) -> None:
        def restart() -> None:
            self.durable.close()
            self.durable = Ledger(self.path, run="r")
            self.memory.replace(self.memory.saved())

        self.renews_its_token(restart)

    @rule()
    def a_copy(self) -> None:
        self.durable.backup(self.path.with_name("copy.sqlite"))
        self.copy = self.memory.saved()

    @rule()
    def a_return_to_the_copy(self) -> None:
        def restore() -> None:
            if self.copy is not None:
                self.durable.restore(self.path.with_name("copy.sqlite"))
                self.memory.replace(self.copy)

        if self.copy is not None:
            self.renews_its_token(restore)

    @invariant()
    def entries_and_counts_are_the_same(self) -> None:
        for uid in ALL:
            assert self.durable.entry(uid) == self.memory.entry(uid)
        for source in "ab":
            for epoch in range(2):
                counts = count_states(self.durable, source, epoch, ROWS)
                assert sum(counts.values()) == ROWS
                mine = [uid for uid in ALL if (uid.source, uid.epoch) == (source, epoch)]
                for state in GroupState:
                    assert counts[state] == sum(self.memory.entry(uid).state is state for uid in mine)
        assert list(entries(self.durable).items()) == list(self.memory.entries.items())
        assert [self.durable.number(uid) for uid in ALL] == [self.memory.number(uid) for uid in ALL]
        assert self.durable.num_admitted == self.memory.num_admitted == len(self.memory.entries)
        assert self.durable.recover() == self.memory.recover()
        assert self.durable.commits() == self.memory.commits()
        for rollout_id in range(3):
            assert self.durable.selected(rollout_id) == self.memory.selected(rollout_id)


def leases_by_ticket(audit: LedgerAudit) -> dict[int, tuple[int, ...]]:
    """Leased, finished, requeued, rejected and quarantined of each ticket, counted group by group. One that is pending
    again must have left the rollout of the line before."""
    ends = [GroupState.LEASED, GroupState.FINISHED, GroupState.PENDING, GroupState.REJECTED, GroupState.QUARANTINED]
    counts: dict[int, Counter[GroupState]] = {}
    for uid, _ in audit.states():
        ticket, known = -1, None
        for line in audit.history(uid):
            if line.after is GroupState.PENDING:
                assert line.rollout_id == known
            elif line.after is GroupState.LEASED:
                ticket = line.rollout_id or 0
            known = line.rollout_id
            if line.reason != "selected":
                counts.setdefault(ticket, Counter())[line.after] += 1
    return {ticket: tuple(counter[state] for state in ends) for ticket, counter in counts.items()}


def answer(ledger: Ledger | MemoryLedger, request: tuple[Any, ...]) -> tuple[str, object]:
    """What the ledger returns, or the text of its error."""
    name, subject, *values = request
    try:
        return "returned", getattr(ledger, name)(subject, *values)
    except BufferStateError as error:
        return "refused", str(error)


TestBothLedgers = BothLedgers.TestCase
TestBothLedgers.settings = settings(max_examples=30, stateful_step_count=25)
