"""``buffer-rl ledger``, as a user runs it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.state import BufferState
from buffer_rl.cli import main
from buffer_rl.data.source import PromptDataSource
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, RowId, Ticket
from harness.tickets import close_rollout

UIDS = [GroupUid("data", row, 0) for row in range(5)]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of 10 rows: 0 and 1 are trained, 2 was selected, 3 is rejected, 4 was leased twice; epoch 1 has begun. The
    ledger is still open, as that of a run at work."""
    folder = tmp_path / "run"
    folder.mkdir()
    Ledger(folder / "ledger.sqlite", run="my-run").close()
    ledger = Ledger(folder / "ledger.sqlite", run="my-run")
    ledger.set_num_rows("data", 10)
    for uid in UIDS:
        ledger.lease(uid, 0)
    for uid in UIDS[:3]:
        ledger.finish(uid, 1)
    ledger.reject(UIDS[3], 1, "zero_std[a]")
    ledger.requeue(UIDS[4], 1)
    ledger.lease(UIDS[4], 1)
    ledger.commit(UIDS[:2], 0, 7)
    ledger.select(UIDS[2:3], 1)
    ledger.lease(GroupUid("data", 9, 1), 1)
    for step in (7, 12, 8):
        (tmp_path / "saves" / f"step_{step:06d}").mkdir(parents=True)
    ledger.backup(tmp_path / "saves" / "step_000007" / "ledger.sqlite")
    ledger.quarantine(UIDS[4], 2, "poison")
    ledger.backup(tmp_path / "saves" / "step_000012" / "ledger.sqlite")
    return folder


def asked(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    assert main(["ledger", *argv, "--json"]) == status
    facts = json.loads(capsys.readouterr().out)
    assert isinstance(facts, dict)
    return facts


def printed(out: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading."""
    table = out.partition(f"\n\n{heading}\n")[2].partition("\n\n")[0].splitlines()
    return [line.split() for line in table[1:]]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["ledger", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err[:18]) == ("", "buffer-rl: error: ")
    return err


def test_groups_are_counted_by_epoch_and_state(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = asked(capsys, str(run_folder))
    assert facts["run"] == "my-run"
    assert facts["openings"] == 2
    assert facts["last_commit"] == {"rollout_id": 0, "step": 7, "num_groups": 2}
    first, second = facts["epochs"]
    assert (first["source"], first["epoch"], first["num_rows"]) == ("data", 0, 10)
    assert first["counts"] == {
        "pending": 5,
        "leased": 0,
        "finished": 1,
        "trained": 2,
        "rejected": 1,
        "quarantined": 1,
    }
    assert second["counts"]["pending"] == 9
    assert second["counts"]["leased"] == 1
    assert main(["ledger", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert "1 rollouts committed, the last one is 0 at step 7" in out
    assert out.splitlines()[3].split() == ["data", "0", "10", "5", "0", "1", "2", "1", "1"]


def test_the_newest_tickets_and_selections_are_shown(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 2 is of the ticket of rollout 0, and selected for rollout 1."""
    facts = asked(capsys, str(run_folder))
    assert facts["newest_tickets"] == [
        {"rollout_id": 1, "leased": 2, "finished": 0, "requeued": 0, "rejected": 0, "quarantined": 1},
        {"rollout_id": 0, "leased": 5, "finished": 3, "requeued": 1, "rejected": 1, "quarantined": 0},
    ]
    assert facts["newest_selections"] == [
        {"rollout_id": 1, "num_groups": 1, "step": None, "tickets": [0]},
        {"rollout_id": 0, "num_groups": 2, "step": 7, "tickets": [0]},
    ]
    assert main(["ledger", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert printed(out, "newest tickets") == [
        ["train_1", "2", "0", "0", "0", "1"],
        ["train_0", "5", "3", "1", "1", "0"],
    ]
    assert printed(out, "newest selections") == [["train_1", "1", "train_0"], ["train_0", "2", "7", "train_0"]]


def test_a_run_that_leased_nothing_has_no_tables_of_tickets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(tmp_path / "ledger.sqlite", run="r").close()
    facts = asked(capsys, str(tmp_path))
    assert facts["newest_tickets"] == facts["newest_selections"] == []
    assert main(["ledger", str(tmp_path)]) == 0
    assert "newest" not in capsys.readouterr().out


def finish(state: BufferState, ticket: Ticket, uid: GroupUid, attempt: int) -> None:
    columns = {"tokens": [np.ones(2, np.int32)], "loss_mask": [np.ones(1, np.float32)]}
    state.finish(ticket, uid, attempt, [RowId(uid, 0)], columns)


def test_a_rollout_whose_worker_was_replaced_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P = 2. train_0: of rows 0 to 3, 0 is finished, 1 rejected, 2 and 3 leased when the worker dies; the next worker
    leases 2, 3 and 4, finishes 2, 3 and a foreign group, and never reports 4. Surplus: row 3 and the foreign group.
    train_1: of rows 3, 5 and 6, 5 is quarantined; it is closed, and not trained on yet."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"p{row}"}) + "\n" for row in range(8)))
    args: Any = compose(CORE_SECTIONS)(
        prompt_data=str(rows), n_samples_per_prompt=1, rollout_batch_size=2, rollout_shuffle=False
    )
    ledger = Ledger(tmp_path / "ledger.sqlite", run="r")
    state = BufferState(PromptDataSource(args), ledger=ledger, groups_per_step=2)
    ticket = state.generate(0)
    first, second, *_ = state.get_samples(ticket, 4)
    finish(state, ticket, first.uid, 1)
    state.reject(ticket, second.uid, 1, "zero_std")
    ticket = state.pass_on(ticket)
    again = state.get_samples(ticket, 3)
    assert [(group.uid.row, group.attempt) for group in again] == [(2, 2), (3, 2), (4, 1)]
    for group in again[:2]:
        finish(state, ticket, group.uid, group.attempt)
    finish(state, ticket, GroupUid("my-env", 0, 0), 1)
    assert close_rollout(state, ticket).drops == {"surplus": 1, "unreported": 1, "zero_std": 1}
    state.commit(0, 1)
    state.release(1)
    ticket = state.generate(1)
    groups = state.get_samples(ticket, 3)
    assert [group.uid.row for group in groups] == [3, 5, 6]
    for group in (groups[0], groups[2]):
        finish(state, ticket, group.uid, group.attempt)
    state.quarantine(ticket, groups[1].uid, 1, "poison")
    close_rollout(state, ticket)

    assert main(["ledger", str(tmp_path), "--verify"]) == 0
    out = capsys.readouterr().out
    assert printed(out, "newest tickets") == [
        ["train_1", "3", "2", "0", "0", "1"],
        ["train_0", "8", "4", "4", "2", "0"],  # leased: 4, 3 and the foreign one; requeued: 2 by the death, 2 surplus
    ]
    assert printed(out, "newest selections")[:2] == [["train_1", "2", "train_1"], ["train_0", "2", "1", "train_0"]]
    state.abandon(1)
    assert asked(capsys, str(tmp_path))["newest_tickets"][0]["requeued"] == 2
    assert [row["rollout_id"] for row in asked(capsys, str(tmp_path))["newest_selections"]] == [0]


def test_the_ledger_of_a_run_a_checkpoint_and_the_newest_of_many_is_found(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = run_folder.parent / "saves"
    for path, leased in (
        (run_folder / "ledger.sqlite", 0),
        (saves, 0),
        (saves / "step_000012", 0),
        (saves / "step_000007", 1),
        (saves / "step_000007" / "ledger.sqlite", 1),
    ):
        facts = asked(capsys, str(path), "--verify")
        assert facts["epochs"][0]["counts"]["leased"] == leased
        assert facts["faults"] == []
    link = run_folder.parent / "elsewhere" / "ledger.sqlite"  # as where --ledger-dir is another disk
    link.parent.mkdir()
    link.symlink_to(run_folder / "ledger.sqlite")
    assert asked(capsys, str(link.parent), "--verify")["epochs"][0]["counts"]["quarantined"] == 1
    copied = saves / "step_000007" / "files_0123"  # as from an object store
    copied.mkdir()
    (saves / "step_000007" / "ledger.sqlite").rename(copied / "ledger.sqlite")
    assert asked(capsys, str(saves / "step_000007"))["path"] == str(copied / "ledger.sqlite")


def test_a_group_is_found_with_its_history(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = asked(capsys, str(run_folder), "--uid", "data:4:0")
    assert facts["entry"]["state"] == "quarantined"
    history = [(line["before"], line["after"], line["attempt"], line["rollout_id"]) for line in facts["history"]]
    assert history == [
        ("pending", "leased", 1, 0),
        ("leased", "pending", 1, 0),
        ("pending", "leased", 2, 1),
        ("leased", "quarantined", 2, 1),
    ]
    assert {line["incarnation"] for line in facts["history"]} == {2}
    assert main(["ledger", str(run_folder), "--uid", "data:3:0"]) == 0
    out = capsys.readouterr().out
    assert "group data:3:0 is rejected" in out
    assert "zero_std[a]" in out
    assert main(["ledger", str(run_folder), "--uid", "data:8:0"]) == 0
    assert capsys.readouterr().out == "group data:8:0 was never leased\n"


def test_foreign_groups_have_a_line_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", run="r")
    ledger.set_num_rows("data", 3)
    for row in range(4):
        uid = GroupUid("my-env", row, row)
        ledger.lease(uid, 0, foreign=True)
        ledger.finish(uid, 1)
    ledger.lease(GroupUid("data", 1, 0), 0)
    ledger.requeue(GroupUid("my-env", 0, 0), 1)
    ledger.commit([GroupUid("my-env", 2, 2)], 0, 1)
    assert main(["ledger", str(tmp_path), "--verify"]) == 0
    out = capsys.readouterr().out
    *_, data, foreign, lost = out.partition("\n\n")[0].splitlines()
    assert data.split() == ["data", "0", "3", "2", "1", "0", "0", "0", "0"]
    assert foreign.split() == ["my-env", "foreign", "?", "1", "0", "2", "1", "0", "0"]
    assert lost == "1 foreign groups were lost before their step, or not needed, and not imported again"
    assert out.splitlines()[-1] == "the accounting holds"
    assert printed(out, "newest tickets") == [["train_0", "5", "4", "1", "0", "0"]]
    facts = asked(capsys, str(tmp_path))
    assert [row["epoch"] for row in facts["epochs"]] == [0, None]
    trained = {"rollout_id": 0, "num_groups": 1, "step": 1, "tickets": [0]}
    assert facts["newest_selections"] == [trained]  # two more are finished, and were not selected


# One for each rule of the accounting: what a wrong ledger, or somebody by hand, might have written.
TAMPERED = {
    "but its history ends with finished": "UPDATE groups SET state = 'rejected' WHERE row = 2 AND epoch = 0",
    "without attempt or rollout": "UPDATE groups SET attempt = 0 WHERE row = 2 AND epoch = 0",
    "was trained 2 times": "INSERT INTO history SELECT NULL, admitted, time, from_state, to_state, attempt, rollout_id,"
    " reason, step, incarnation FROM history WHERE to_state = 'trained' AND admitted = 0",
    "left trained for pending": "INSERT INTO history VALUES (NULL, 0, 0.0, 'trained', 'pending', 1, 0, '', NULL, 2)",
    "was finished, and then left leased": "UPDATE history SET from_state = 'leased' WHERE to_state = 'trained'",
    "was committed with 3 groups at step 7, and 2 are trained": "UPDATE commits SET num_groups = 3",
    "is trained, and rollout 0 was not committed at step 7": "DELETE FROM commits",
    "is of no source": "DELETE FROM sources",
    "names a group that does not exist": "UPDATE history SET admitted = 99 WHERE id = 1",
    "has 4 rows, and 5 groups in epoch 0": "UPDATE sources SET num_rows = 4",
    "the file is damaged: wrong # of entries in index live": "PRAGMA writable_schema = ON; UPDATE sqlite_master"
    " SET sql = 'CREATE INDEX live ON groups (admitted) WHERE attempt > 1' WHERE name = 'live'",
}


@pytest.mark.parametrize("fault", TAMPERED)
def test_verify_says_what_does_not_add_up(run_folder: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_folder.parent / "saves" / "step_000012" / "ledger.sqlite"
    assert main(["ledger", str(path), "--verify"]) == 0
    assert "the accounting holds" in capsys.readouterr().out
    db = sqlite3.connect(path)
    db.executescript(TAMPERED[fault])
    db.commit()
    db.close()
    assert main(["ledger", str(path), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "the accounting does not hold" in out
    assert fault in out
    assert "None" not in out  # a history without the line of its lease is of no ticket
    assert any(fault in line for line in asked(capsys, str(path), "--verify", status=1)["faults"])


def test_mistakes_are_explained(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such folder" in refused(capsys, str(tmp_path / "nothing"))
    assert "a folder that holds ledger.sqlite" in refused(capsys, str(tmp_path))
    assert "SOURCE:ROW:EPOCH" in refused(capsys, str(run_folder), "--uid", "nonsense")
    damaged = tmp_path / "ledger.sqlite"
    damaged.write_bytes((run_folder.parent / "saves" / "step_000012" / "ledger.sqlite").read_bytes()[:20_000])
    assert "the ledger is damaged" in refused(capsys, str(damaged), "--verify")
