"""SqliteLedger and MemoryLedger answer the same requests with the same answers and the same errors."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from buffer_rl.buffer.ledger import GroupState, Ledger, MemoryLedger
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.sqlite_ledger import SqliteLedger
from buffer_rl.errors import BufferStateError
from buffer_rl.types import GroupUid

ROWS = 3
ALL = [GroupUid(source, row, epoch) for source in "ab" for epoch in range(2) for row in range(ROWS)]
UIDS = st.sampled_from(ALL[:5])  # few, so that requests meet
ATTEMPTS = st.integers(0, 3)
ROLLOUTS = st.integers(0, 2)
INCARNATIONS = st.sampled_from(["live", "live", "former", "none"])
SOME = st.lists(UIDS, max_size=4)  # also twice the same
REQUESTS = st.one_of(
    st.tuples(st.just("lease"), UIDS, ROLLOUTS),
    st.tuples(st.just("lease"), UIDS, ROLLOUTS),
    st.tuples(st.sampled_from(["finish", "finish", "finish", "requeue"]), UIDS, ATTEMPTS, INCARNATIONS),
    st.tuples(st.sampled_from(["reject", "quarantine"]), UIDS, ATTEMPTS, st.sampled_from(["", "why"]), INCARNATIONS),
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
        self.durable = SqliteLedger(self.path, run="r")
        self.memory = MemoryLedger()
        self.former = [("", "")]
        self.copy: dict[str, Any] | None = None

    def teardown(self) -> None:
        self.durable.close()
        audit = LedgerAudit(self.path)
        assert audit.faults() == []
        audit.close()
        self.folder.cleanup()

    def ask_both(self, request: tuple[Any, ...]) -> None:
        former = self.former[-1]
        assert answer(self.durable, request, former[0]) == answer(self.memory, request, former[1])

    def begins_anew(self, change: Callable[[], None]) -> None:
        before = self.durable.incarnation, self.memory.incarnation
        change()
        self.former.append(before)
        assert self.durable.incarnation != before[0]

    @rule(request=REQUESTS)
    def one_request(self, request: tuple[Any, ...]) -> None:
        self.ask_both(request)

    @rule(uids=st.lists(UIDS, unique=True, min_size=1), rollout_id=ROLLOUTS)
    def a_whole_step(self, uids: list[GroupUid], rollout_id: int) -> None:
        for uid in uids:
            self.ask_both(("lease", uid, rollout_id))
            self.ask_both(("finish", uid, self.memory.entry(uid).attempt, "live"))
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
                    answer(self.durable, request, "former")
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
            self.durable = SqliteLedger(self.path, run="r")
            self.memory.load_state_dict(self.memory.state_dict())

        self.begins_anew(restart)

    @rule()
    def a_copy(self) -> None:
        self.durable.backup(self.path.with_name("copy.sqlite"))
        self.copy = json.loads(json.dumps(self.memory.state_dict()))

    @rule()
    def a_return_to_the_copy(self) -> None:
        def restore() -> None:
            if self.copy is not None:
                self.durable.restore(self.path.with_name("copy.sqlite"))
                self.memory.load_state_dict(self.copy)

        if self.copy is not None:
            self.begins_anew(restore)

    @rule()
    def states_that_are_exchanged(self) -> None:
        def exchange() -> None:
            state = json.loads(json.dumps(self.memory.state_dict()))
            self.memory.load_state_dict(json.loads(json.dumps(self.durable.state_dict())))
            self.durable.load_state_dict(state)

        self.begins_anew(exchange)

    @invariant()
    def entries_and_counts_are_the_same(self) -> None:
        for uid in ALL:
            assert self.durable.entry(uid) == self.memory.entry(uid)
        for source in "ab":
            for epoch in range(2):
                counts = self.durable.counts(source, epoch, ROWS)
                assert counts == self.memory.counts(source, epoch, ROWS)
                assert sum(counts.values()) == ROWS
                mine = [uid for uid in ALL if (uid.source, uid.epoch) == (source, epoch)]
                for state in GroupState:
                    assert counts[state] == sum(self.memory.entry(uid).state is state for uid in mine)
        assert self.durable.state_dict() == self.memory.state_dict()
        assert [self.durable.number(uid) for uid in ALL] == [self.memory.number(uid) for uid in ALL]
        assert self.durable.num_admitted == self.memory.num_admitted == len(self.memory.state_dict()["entries"])
        assert self.durable.recover() == self.memory.recover()
        assert self.durable.commits() == self.memory.commits()
        for rollout_id in range(3):
            assert self.durable.selected(rollout_id) == self.memory.selected(rollout_id)


def answer(ledger: Ledger, request: tuple[Any, ...], former: str) -> tuple[str, object]:
    """What the ledger returns, or the text of its error."""
    name, subject, *values = request
    keywords = {}
    if name in ("finish", "requeue", "reject", "quarantine"):
        keywords["incarnation"] = {"live": ledger.incarnation, "former": former, "none": None}[values.pop()]
    try:
        return "returned", getattr(ledger, name)(subject, *values, **keywords)
    except BufferStateError as error:
        return "refused", str(error)


TestBothLedgers = BothLedgers.TestCase
TestBothLedgers.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
