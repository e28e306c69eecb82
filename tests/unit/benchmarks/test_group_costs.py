"""The benchmark of a group's costs runs every operation, in sound ledgers, and says what became worse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit

STEP = {
    "generate", "lease", "finish", "take ahead", "take", "put_fields", "take final", "close", "plan", "plan mini-batch",
    "commit", "release",
}  # fmt: skip
OPERATIONS = {
    "ledger": {"lease", "requeue", "finish", "select", "commit"},
    "steps": {"restart", *STEP},
    "process": STEP,
    "pool": STEP,
    "queue": {"restart", "generate", "lease", "requeue", "lease chosen", "requeue chosen", "finish foreign", "close",
              "commit", "release"},
    "evaluation": {"generate", "lease", "finish"},
}  # fmt: skip


@pytest.mark.parametrize("part", OPERATIONS)
def test_each_part_measures_all_its_operations_and_goes_on_with_the_ledger_that_it_left(
    script: Callable[[str], ModuleType], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = script("group_cost_parts"), tmp_path / "ledger.sqlite"
    monkeypatch.setattr(module, "MEASURED", 2)
    monkeypatch.setattr(module, "LONG_CALLS", 2)
    for _ in range(2):
        assert set(module.measure(part, 200, path)) == OPERATIONS[part]
    if path.exists():
        assert LedgerAudit(path).faults() == []


@pytest.mark.parametrize("one", ["_train", "_give_back"])
def test_a_filled_ledger_is_one_that_was_led_through_all_its_steps(
    script: Callable[[str], ModuleType], one: str, tmp_path: Path
) -> None:
    module = script("group_cost_parts")
    module._fill(tmp_path / "ledger.sqlite", 3, getattr(module, one))
    ledger = Ledger(tmp_path / "ledger.sqlite", run=module.RUN)
    uids = [module.uid_of(number) for number in range(3 * module.STEP)]
    assert [ledger.number(uid) for uid in uids] == list(range(192))
    assert [ledger.entry(uid).attempt for uid in uids] == [1] * 192
    assert LedgerAudit(tmp_path / "ledger.sqlite").faults() == []
    if one == "_train":
        assert [ledger.entry(uid).step for uid in uids] == [0] * 64 + [1] * 64 + [2] * 64
        assert ledger.commits() == {0: 0, 1: 1, 2: 2}
    else:
        assert ledger.recover() == uids


def test_what_doubles_grows_and_what_no_round_reached_before_is_slower(script: Callable[[str], ModuleType]) -> None:
    module = script("group_costs")
    ours = {("pool", "take"): {1000: [10.0, 11.0, 12.0], 10000: [23.0, 25.0, 24.0]}}
    before = {("pool", "take"): {1000: [9.0, 9.5, 12.5], 10000: [21.0, 20.0, 19.0]}}
    assert module.grown(ours) == ["GROWS   pool, take: 11.0 to 24.0, most 2 times"]
    assert module.grown({("pool", "take"): {1000: [12.0], 10000: [24.0]}, ("pool", "plan"): {1: [0.1], 2: [0.9]}}) == []
    assert module.slower(ours, before) == ["SLOWER  pool, take, 10,000 groups: 20.0 before, 24.0 now"]
    assert module.slower(before, ours) == []
