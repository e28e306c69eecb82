"""The durable ledger over restarts, copies and other writers. That it answers as the one in memory does is in
``test_ledger_equivalence.py``."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState, LedgerEntry
from buffer_rl.errors import BufferStateError, CheckpointError
from buffer_rl.records.groups import GroupUid
from harness.ledger_contents import count_states, entries

ROWS = 8
UIDS = [GroupUid("data", row, 0) for row in (5, 2, 7, 0, 3)]  # the order in which they are leased


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path, run="r")
    yield ledger
    ledger.close()


def lease_all(ledger: Ledger, rollout_id: int = 0) -> None:
    for uid in UIDS:
        ledger.lease(uid, rollout_id)


def states(ledger: Ledger) -> list[str]:
    return [str(ledger.entry(uid).state) for uid in UIDS]


def faults(path: Path) -> list[str]:
    audit = LedgerAudit(path)
    try:
        return audit.faults()
    finally:
        audit.close()


def test_a_restart_returns_what_was_leased_or_finished_in_the_order_of_admission(ledger: Ledger, path: Path) -> None:
    lease_all(ledger)
    ledger.finish(UIDS[1], 1)
    ledger.finish(UIDS[2], 1)
    ledger.commit([UIDS[2]], 0, 1)
    ledger.requeue(UIDS[0], 1)
    ledger.reject(UIDS[3], 1, "zero_std")
    again = Ledger(path, run="r")
    assert states(again) == ["pending", "pending", "trained", "rejected", "pending"]
    assert again.recover() == [UIDS[0], UIDS[1], UIDS[4]]
    assert again.num_admitted == len(UIDS)
    assert again.commits() == {0: 1}
    assert again.lease(UIDS[4], 1) == 2
    again.close()
    assert faults(path) == []


def test_selected_groups_stay_finished_where_the_trainer_may_hold_them(ledger: Ledger, path: Path) -> None:
    lease_all(ledger)
    for uid in UIDS[:3]:
        ledger.finish(uid, 1)
    ledger.select(UIDS[1:3], 0)
    kept = Ledger(path, run="r", keep_selected=True)
    assert states(kept) == ["pending", "finished", "finished", "pending", "pending"]
    assert kept.selected(0) == UIDS[1:3]
    assert kept.selected(1) == []
    kept.commit(UIDS[1:3], 0, 1)
    assert kept.selected(0) == []
    kept.close()
    assert faults(path) == []
    returned = Ledger(path, run="r")
    assert states(returned) == ["pending", "trained", "trained", "pending", "pending"]
    returned.close()


def test_late_reports_are_refused_and_change_nothing(ledger: Ledger, path: Path) -> None:
    uid = UIDS[0]
    assert ledger.lease(uid, 0) == 1
    again = Ledger(path, run="r")
    assert again.lease(uid, 0) == 2
    before = again.entry(uid)
    for report in (again.finish, again.requeue):
        with pytest.raises(BufferStateError, match="refused"):
            report(uid, 1)
    for drop in (again.reject, again.quarantine):
        with pytest.raises(BufferStateError, match="refused"):
            drop(uid, 1, "why")
    assert again.entry(uid) == before
    again.finish(uid, 2)
    with pytest.raises(BufferStateError, match="it is finished"):
        again.finish(uid, 2)
    again.close()


def test_a_lease_whose_attempt_a_copy_gives_again_has_another_fencing_token(ledger: Ledger, path: Path) -> None:
    ledger.backup(path.with_name("copy.sqlite"))
    former, attempt = ledger.fencing_token, ledger.lease(UIDS[0], 0)
    ledger.restore(path.with_name("copy.sqlite"))
    assert ledger.lease(UIDS[0], 0) == attempt
    assert ledger.fencing_token != former
    ledger.finish(UIDS[0], attempt)


def test_a_commit_is_made_once(ledger: Ledger, path: Path) -> None:
    lease_all(ledger)
    for uid in UIDS[:3]:
        ledger.finish(uid, 1)
    with pytest.raises(BufferStateError, match="is leased"):
        ledger.commit(UIDS, 0, 1)
    assert states(ledger) == ["finished"] * 3 + ["leased"] * 2
    ledger.commit(UIDS[:2], 0, 1)
    after = entries(ledger)
    ledger.commit(UIDS[:2], 0, 1)
    ledger.commit(list(reversed(UIDS[:2])), 0, 1)
    for uids, step, reason in (
        (UIDS[:2], 2, "was committed at step 1, not 2"),
        (UIDS[:1], 1, "other groups"),
        (UIDS[:3], 1, "other groups"),
        ([UIDS[0], UIDS[2]], 1, "other groups"),
        ([], 1, "other groups"),
    ):
        with pytest.raises(BufferStateError, match=reason):
            ledger.commit(uids, 0, step)
    with pytest.raises(BufferStateError, match=r"is trained \(step 1\)"):
        ledger.commit(UIDS[:2], 1, 2)
    assert entries(ledger) == after
    assert ledger.commits() == {0: 1}
    ledger.commit(UIDS[2:3], 1, 2)
    with pytest.raises(BufferStateError, match="other groups"):
        ledger.commit([UIDS[0], UIDS[2]], 0, 1)
    again = Ledger(path, run="r")  # also after a restart
    again.commit(UIDS[:2], 0, 1)
    again.close()
    assert faults(path) == []


def test_a_copy_brings_everything_back_as_it_was(ledger: Ledger, path: Path) -> None:
    lease_all(ledger)
    ledger.set_num_rows("data", ROWS)
    ledger.remember("position", "17")
    for uid in UIDS[:2]:
        ledger.finish(uid, 1)
    ledger.commit(UIDS[:1], 0, 1)
    copy = path.with_name("copy.sqlite")
    ledger.backup(copy)
    assert sorted(file.name for file in path.parent.iterdir() if "copy" in file.name) == ["copy.sqlite"]
    assert copy.read_bytes()[18:20] == b"\1\1"  # no WAL: it can be read where nothing can be written
    ledger.commit(UIDS[1:2], 1, 2)
    ledger.remember("position", "18")
    ledger.restore(copy)
    assert states(ledger) == ["trained"] + ["pending"] * 4
    assert (ledger.commits(), ledger.recall("position")) == ({0: 1}, "17")
    assert count_states(ledger, "data", 0, ROWS) == dict.fromkeys(GroupState, 0) | {
        GroupState.TRAINED: 1,
        GroupState.PENDING: ROWS - 1,
    }
    other = Ledger(path.with_name("other.sqlite"), run="another")  # a checkpoint may begin another run
    other.restore(copy)
    assert entries(other) == entries(ledger)
    other.close()
    assert faults(path) == faults(path.with_name("other.sqlite")) == faults(copy) == []


@pytest.mark.parametrize("damage", ["cut", "zeroed", "another kind", "absent"])
def test_a_damaged_copy_is_refused_and_changes_nothing(ledger: Ledger, path: Path, damage: str) -> None:
    lease_all(ledger)
    copy = path.with_name("copy.sqlite")
    ledger.backup(copy)
    content = copy.read_bytes()
    if damage == "cut":
        copy.write_bytes(content[: len(content) // 2])
    elif damage == "zeroed":
        copy.write_bytes(content[:4096] + bytes(len(content) - 4096))
    elif damage == "another kind":
        copy.unlink()
        sqlite3.connect(copy).execute("CREATE TABLE t (a)").connection.close()
    else:
        copy.unlink()
    before, token = entries(ledger), ledger.fencing_token
    with pytest.raises(CheckpointError, match=r"copy\.sqlite"):
        ledger.restore(copy)
    assert (entries(ledger), ledger.fencing_token) == (before, token)
    ledger.finish(UIDS[0], 1)


def test_a_copy_that_cannot_be_written_is_an_error(ledger: Ledger, path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be copied"):
        ledger.backup(path.parent / "no folder" / "copy.sqlite")
    with ledger.transaction(), pytest.raises(BufferStateError, match="within a transaction"):
        ledger.backup(path.with_name("copy.sqlite"))


def test_a_transaction_is_there_as_a_whole_or_not_at_all(ledger: Ledger, path: Path) -> None:
    ledger.lease(UIDS[0], 0)
    fresh = GroupUid("new source", 0, 0)

    def give_up() -> None:
        with ledger.transaction():
            ledger.finish(UIDS[0], 1)
            ledger.lease(fresh, 0)
            with ledger.transaction():  # the outermost one counts
                ledger.lease(UIDS[1], 0)
            ledger.remember("position", "1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()
    assert states(ledger) == ["leased"] + ["pending"] * 4
    assert ledger.recall("position") is None
    assert count_states(ledger, "data", 0, ROWS)[GroupState.PENDING] == ROWS - 1
    assert count_states(ledger, "new source", 0, 2)[GroupState.PENDING] == 2
    assert ledger.lease(fresh, 0) == 1  # the number of its source went with the transaction
    assert count_states(ledger, "new source", 0, 2)[GroupState.LEASED] == 1
    assert str(list(entries(ledger))[-1]) == "new source:0:0"
    assert faults(path) == []


def test_a_refused_request_changes_nothing_of_its_transaction(ledger: Ledger, path: Path) -> None:
    with ledger.transaction():
        lease_all(ledger)
        for uid in UIDS[:2]:
            ledger.finish(uid, 1)
        before = entries(ledger)
        for request in (
            lambda: ledger.select(UIDS, 0),
            lambda: ledger.commit(UIDS, 0, 1),
            lambda: ledger.reject(UIDS[0], 1, "why"),
            lambda: ledger.reject_finished(UIDS[2], 1, "why"),
        ):
            with pytest.raises(BufferStateError):
                request()
        assert ledger.selected(0) == []
        assert entries(ledger) == before
    assert states(ledger) == ["finished", "finished", "leased", "leased", "leased"]
    assert faults(path) == []


def test_a_finished_group_is_rejected_unless_a_step_has_it(ledger: Ledger, path: Path) -> None:
    lease_all(ledger)
    for uid in UIDS[:2]:
        ledger.finish(uid, 1)
    ledger.select(UIDS[:1], 0)
    with pytest.raises(BufferStateError, match="is selected for rollout 0"):
        ledger.reject_finished(UIDS[0], 1, "too_old")
    ledger.reject_finished(UIDS[1], 1, "too_old")
    assert states(ledger)[:2] == ["finished", "rejected"]
    assert faults(path) == []
    audit = LedgerAudit(path)
    try:
        assert [(row.leased, row.finished, row.rejected) for row in audit.tickets()] == [(5, 2, 1)]
    finally:
        audit.close()


def test_the_former_writer_is_refused_once_another_one_has_opened_the_file(ledger: Ledger, path: Path) -> None:
    lease_all(ledger)
    ledger.finish(UIDS[0], 1)
    successor = Ledger(path, run="r")
    successor.lease(UIDS[1], 0)
    before, copy = entries(successor), path.with_name("copy.sqlite")
    successor.backup(copy)
    for change in (
        lambda: ledger.lease(UIDS[2], 0),
        lambda: ledger.finish(UIDS[1], 1),
        lambda: ledger.requeue(UIDS[1], 2),
        lambda: ledger.reject(UIDS[1], 2, "why"),
        lambda: ledger.quarantine(UIDS[1], 2, "why"),
        lambda: ledger.select([UIDS[0]], 0),
        lambda: ledger.commit([UIDS[0]], 0, 1),
        lambda: ledger.remember("position", "1"),
        lambda: ledger.set_num_rows("data", 1),
        lambda: ledger.restore(copy),
    ):
        with pytest.raises(BufferStateError, match="another Buffer has opened the ledger"):
            change()
    assert entries(successor) == before
    successor.finish(UIDS[1], 2)
    successor.close()
    assert faults(path) == []


def test_a_ledger_of_another_run_is_refused_and_stays_as_it_is(ledger: Ledger, path: Path) -> None:
    ledger.lease(UIDS[0], 0)
    with pytest.raises(CheckpointError, match="is of run 'r', not 'other'"):
        Ledger(path, run="other")
    ledger.finish(UIDS[0], 1)  # it does not even have a new fencing token
    assert ledger.entry(UIDS[0]) == LedgerEntry(state=GroupState.FINISHED, attempt=1, rollout_id=0)


_FILL_THE_DISK = """
import resource, sys
from pathlib import Path
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.errors import BufferStateError
from buffer_rl.records.groups import GroupUid
path = Path(sys.argv[1])
ledger = Ledger(path, run="r")
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limits[1]))  # of the WAL, as a full disk
number = 0
while True:
    try:
        with ledger.transaction():
            for row in range(7):
                ledger.lease(GroupUid("s", number + row, 0), 0)
    except BufferStateError as error:
        text = str(error)
        break
    number += 7
assert "cannot be written" in text and "disk full" in text and str(path) in text, text
leased = sum(ledger.entry(GroupUid("s", row, 0)).state == "leased" for row in range(number + 7))
assert ledger.num_admitted == leased == number > 100, (leased, number)
assert ledger.entry(GroupUid("s", number - 1, 0)).state == "leased"
assert ledger.entry(GroupUid("s", number, 0)).attempt == 0
resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # there is room again
assert ledger.lease(GroupUid("s", number, 0), 0) == 1
print(number)
"""


def test_a_full_disk_is_an_error_and_changes_nothing(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FILL_THE_DISK, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    again = Ledger(path, run="r")
    assert len(again.recover()) == int(done.stdout) + 1
    again.close()
    assert faults(path) == []


def test_a_full_disk_while_everything_is_replaced_leaves_the_fencing_token_as_it_was(path: Path) -> None:
    ledger = Ledger(path, run="r")
    lease_all(ledger)
    copy = path.with_name("copy.sqlite")
    ledger.backup(copy)
    token, before = ledger.fencing_token, entries(ledger)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name("ledger.sqlite-wal").stat().st_size, limits[1]))
    try:
        with pytest.raises(BufferStateError, match="cannot be written"):
            ledger.restore(copy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (ledger.fencing_token, entries(ledger)) == (token, before)
    ledger.finish(UIDS[0], 1)
    ledger.close()


def test_a_full_disk_under_the_runs_ledger_is_not_blamed_on_the_checkpoint(ledger: Ledger, path: Path) -> None:
    copy = path.with_name("copy.sqlite")
    lease_all(ledger)
    ledger.backup(copy)
    before = entries(ledger)
    local = path.with_name(".ledger.sqlite.restore")
    local.symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left") as caught:
        ledger.restore(copy)
    assert caught.value.where == str(local)
    assert "cannot be read" not in caught.value.what
    assert not os.path.lexists(local)
    assert entries(ledger) == before
    copy.unlink()
    copy.mkdir()
    with pytest.raises(CheckpointError, match="the copy of the ledger cannot be read") as caught:
        ledger.restore(copy)
    assert caught.value.where == str(copy)


def test_a_full_disk_ends_a_copy_and_leaves_nothing_of_it(path: Path) -> None:
    ledger = Ledger(path, run="r")
    lease_all(ledger)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be copied"):
            ledger.backup(path.with_name("copy.sqlite"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [name for name in os.listdir(path.parent) if "copy" in name] == []
    ledger.finish(UIDS[0], 1)
    ledger.close()
