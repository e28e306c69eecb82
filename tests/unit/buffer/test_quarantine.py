"""Groups that are dropped for good, and the counts of failed attempts, over the Buffer's state."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.state import BufferState
from buffer_rl.errors import BufferStateError
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup
from harness.ledger_contents import count_states
from harness.tickets import close_rollout


class Rows:
    """Rows 0, 1, … of one source."""

    pool_weights = None
    source_hashes = ("rows",)

    def __init__(self) -> None:
        self.next = 0

    def draw(self, num_samples: int) -> list[SampleGroup]:
        first, self.next = self.next, self.next + num_samples
        uids = [GroupUid("rows", row, 0) for row in range(first, self.next)]
        return [SampleGroup(uid=uid, samples=[Sample(uid=uid, sample_index=0, prompt="p")]) for uid in uids]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Any) -> None:
        self.next = state["next"]

    mark, back_to = state_dict, load_state_dict

    def __len__(self) -> int:
        return 10


def make_state() -> tuple[BufferState, Ledger]:
    ledger = Ledger.in_memory()
    return BufferState(Rows(), ledger=ledger, groups_per_step=2), ledger


def test_a_group_in_quarantine_keeps_its_reason_and_is_never_leased_again() -> None:
    state, ledger = make_state()
    ticket = state.generate(0)
    first, second = state.get_samples(ticket, 2)
    state.quarantine(ticket, first.uid, first.attempt, "reward_failed:timeout")
    entry = ledger.entry(first.uid)
    assert (entry.state, entry.reason) == (GroupState.QUARANTINED, "reward_failed:timeout")
    with pytest.raises(BufferStateError, match="not leased"):
        state.quarantine(ticket, first.uid, first.attempt, "again")
    state.add_samples(ticket, [(second.uid, second.attempt)])
    assert [group.uid.row for group in state.get_samples(ticket, 2)] == [1, 2]
    assert close_rollout(state, ticket).drops == {"quarantined": 1, "unreported": 2}
    counts = count_states(state.ledger, "rows", 0, 10)
    assert sum(counts.values()) == 10
    assert counts[GroupState.QUARANTINED] == 1


def test_failures_are_counted_by_kind_and_group_over_rollouts_and_late_ones_are_refused() -> None:
    state, _ = make_state()
    ticket = state.generate(0)
    groups = state.get_samples(ticket, 2)
    left, right = (group.uid for group in groups)
    assert state.count_failure(ticket, left, "data") == (1, 1)
    assert state.count_failure(ticket, right, "data") == (2, 1)
    assert state.count_failure(ticket, left, "infra") == (1, 1)
    assert state.count_failure(ticket, left, "data") == (3, 2)
    close_rollout(state, ticket)
    with pytest.raises(BufferStateError, match="it came too late"):
        state.count_failure(ticket, left, "data")
    evaluations: Any = [SampleGroup(uid=left, samples=groups[0].samples)]
    state._eval_groups = lambda: evaluations
    assert state.count_failure(state.generate(0, evaluation=True), left, "data") == (4, 3)
