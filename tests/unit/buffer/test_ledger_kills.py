"""The ledger survives ``kill -9``: at chosen statements, and at random. The full counts are those of
``benchmarks/ledger_kills.py``; here are samples of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.ledger_failpoints import kill_everywhere
from harness.ledger_kills import kill_at_random
from harness.ledger_mutants import MUTANTS

MEMORY = Path("/dev/shm")
# Every n-th boundary is enough: a commit in two transactions leaves a gap of a few, the others are wrong ever after.
EVERY = {"split-commit": 4, "kept-leases": 20, "same-token": 20}


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that is possible: processes are killed here, not disks."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as name:
        yield Path(name)


@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "in batches"])
@pytest.mark.parametrize("keep_selected", [pytest.param(False, marks=pytest.mark.slow), True], ids=["returned", "kept"])
def test_a_kill_at_any_statement_leaves_what_was_acknowledged(folder: Path, batched: bool, keep_selected: bool) -> None:
    report = kill_everywhere(folder, batched=batched, keep_selected=keep_selected, every=17)
    assert report.violations == []
    assert report.kills > 29


@pytest.mark.slow
def test_random_kills_duplicate_and_lose_nothing(folder: Path) -> None:
    report = kill_at_random(folder, 60)
    assert report.faults == []
    assert (report.kills, report.duplicated, report.missing) == (60, 0, 0)
    assert report.groups >= report.commits > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_ledger_is_found_out(folder: Path, name: str) -> None:
    assert kill_everywhere(folder, MUTANTS[name], batched=True, every=EVERY[name], stop=True).violations


@pytest.mark.slow
def test_random_kills_find_out_leases_that_are_not_returned(folder: Path) -> None:
    assert kill_at_random(folder, 20, ledger=MUTANTS["kept-leases"]).violations


def test_a_script_that_stops_by_itself_is_a_violation(folder: Path) -> None:
    class Broken(MUTANTS["kept-leases"]):  # type: ignore[misc]
        def select(self, uids: object, rollout_id: int) -> None:
            raise ZeroDivisionError

    report = kill_everywhere(folder, Broken, batched=True, every=400)
    assert "stops at ('select'" in report.violations[-1]
