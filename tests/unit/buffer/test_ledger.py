"""The ledger: every uid in exactly one state, refused transitions change nothing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState, LedgerEntry
from buffer_rl.errors import BufferStateError
from buffer_rl.records.groups import GroupUid
from harness.ledger_contents import copied, count_states, go_back

ROWS = 6
UIDS = st.integers(0, ROWS - 1).map(lambda row: GroupUid("s", row, 0))
ATTEMPTS = st.integers(0, 3)


class LedgerMachine(RuleBasedStateMachine):
    """Random calls against a table of the allowed transitions, written down independently."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger.in_memory()
        self.committed: set[GroupUid] | None = None  # of rollout 0, which is committed once, and again as a repeat
        self.model: dict[GroupUid, tuple[str, int]] = {GroupUid("s", row, 0): ("pending", 0) for row in range(ROWS)}

    def expect(self, allowed: bool, call: object) -> None:
        assert callable(call)
        if allowed:
            call()
            return
        with pytest.raises(BufferStateError):
            call()

    @rule(uid=UIDS)
    def lease(self, uid: GroupUid) -> None:
        state, attempt = self.model[uid]
        self.expect(state == "pending", lambda: self.ledger.lease(uid, 0))
        if state == "pending":
            self.model[uid] = ("leased", attempt + 1)

    @rule(uid=UIDS, attempt=ATTEMPTS)
    def finish(self, uid: GroupUid, attempt: int) -> None:
        allowed = self.model[uid] == ("leased", attempt)
        self.expect(allowed, lambda: self.ledger.finish(uid, attempt))
        if allowed:
            self.model[uid] = ("finished", attempt)

    @rule(uid=UIDS, attempt=ATTEMPTS)
    def reject(self, uid: GroupUid, attempt: int) -> None:
        allowed = self.model[uid] == ("leased", attempt)
        self.expect(allowed, lambda: self.ledger.reject(uid, attempt, "why"))
        if allowed:
            self.model[uid] = ("rejected", attempt)

    @rule(uid=UIDS, attempt=ATTEMPTS)
    def requeue(self, uid: GroupUid, attempt: int) -> None:
        allowed = self.model[uid] in (("leased", attempt), ("finished", attempt))
        self.expect(allowed, lambda: self.ledger.requeue(uid, attempt))
        if allowed:
            self.model[uid] = ("pending", attempt)

    @rule(uids=st.lists(UIDS, unique=True, min_size=1))
    def commit(self, uids: list[GroupUid]) -> None:
        first = self.committed is None and all(self.model[uid][0] == "finished" for uid in uids)
        self.expect(first or set(uids) == self.committed, lambda: self.ledger.commit(uids, 0, 1))
        if first:
            self.committed = set(uids)
            self.model |= {uid: ("trained", self.model[uid][1]) for uid in uids}

    @invariant()
    def states_agree_and_counts_add_up(self) -> None:
        for uid, (state, attempt) in self.model.items():
            entry = self.ledger.entry(uid)
            assert (entry.state, entry.attempt) == (state, attempt)
        counts = count_states(self.ledger, "s", 0, ROWS)
        assert sum(counts.values()) == ROWS
        for state in GroupState:
            assert counts[state] == sum(found == state for found, _ in self.model.values())


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_copy_brings_untrained_groups_back_as_pending_and_keeps_attempts() -> None:
    ledger = Ledger.in_memory()
    uids = [GroupUid("s", row, 0) for row in range(4)]
    for uid in uids:
        ledger.lease(uid, 0)
    ledger.finish(uids[0], 1)
    ledger.commit([uids[0]], 0, 7)
    ledger.finish(uids[1], 1)
    ledger.reject(uids[2], 1, "zero_std")
    restored = Ledger.in_memory()
    go_back(restored, copied(ledger))
    assert restored.entry(uids[0]) == LedgerEntry(state=GroupState.TRAINED, attempt=1, rollout_id=0, step=7)
    assert restored.entry(uids[1]) == LedgerEntry(state=GroupState.PENDING, attempt=1)
    assert restored.entry(uids[2]).reason == "zero_std"
    assert restored.entry(uids[3]) == LedgerEntry(state=GroupState.PENDING, attempt=1)
    assert restored.lease(uids[3], 1) == 2
