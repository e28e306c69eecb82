"""``buffer-rl why``: what it says of groups and steps is what the ledger and the files of the run have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.buffer.ledger_audit import Transition
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.cli import main
from buffer_rl.observe.metrics import MetricsFile
from buffer_rl.observe.run_folder import SampleDump
from buffer_rl.observe.timeline import TraceFile, WorkSpan
from buffer_rl.records.groups import GroupUid, RowId
from buffer_rl.verbs.table import shown_time
from buffer_rl.verbs.why.group_life import (
    Attempt,
    GroupLife,
    explain_requeues,
    nearest,
    replacements,
    split_attempts,
)
from buffer_rl.verbs.why.step_life import engine_changes
from harness.async_run import AsyncRun

FOREIGN = GroupUid("theirs", 0, 0)
TRAINED, DROPPED, REPLACEMENT, FAILED, QUARANTINED, KILLED, IN_WORK, PREFETCHED, NEVER = 0, 1, 4, 2, 3, 6, 7, 8, 30


def sample(uid: GroupUid, index: int, reward: float, version: int, kind: str = "train") -> dict[str, Any]:
    return {
        "kind": kind,
        "uid": str(uid),
        "sample_index": index,
        "prompt": "p",
        "response": "r",
        "reward": reward,
        "status": "completed",
        "versions": [[version, 0, 2]],
    }


@pytest.fixture
def run(tmp_path: Path) -> Iterator[AsyncRun]:
    """An asynchronous run with a group of each fate, by the real Buffer; it is at work."""
    run = AsyncRun(tmp_path / "run", per_step=2, target=2, bound=4)
    run.generate(0)
    run.lease(0, 2)  # 0 and 1
    run.reject(0, DROPPED)
    run.lease(0, 1)  # 2, which fails twice
    run.state.count_failure(run.tickets[0], run.uid(FAILED), "data")
    run.give_back(0, FAILED)
    run.lease(0, 1)
    run.finish(0, TRAINED, FAILED)
    run.generate(1)
    run.lease(1, 2)  # 3 and 4
    for _ in range(2):
        run.state.count_failure(run.tickets[1], run.uid(QUARANTINED), "infra")
    run.state.quarantine(run.tickets[1], run.uid(QUARANTINED), 1, "infra:engine")
    run.lease(1, 1)  # 5
    run.finish(1, 4, 5)
    assert run.close(0) == [0, 2]
    run.publish(1)
    run.generate(2)
    run.lease(2, 2)  # 6 and 7
    run.tickets[2] = run.state.pass_on(run.tickets[2])  # its rollout worker died
    run.lease(2, 2)
    run.finish(2, KILLED)
    run.generate(3)
    run.lease(3, 2)
    run.finish(3, PREFETCHED)
    write_files(run)
    yield run
    run.state.ledger.close()


def write_files(run: AsyncRun) -> None:
    facts = {"use": "train", "path": "rows.jsonl", "num_rows": 40, "source_hash": run.source}
    held = {"use": "eval/held", "path": "held.jsonl", "num_rows": 4, "source_hash": "abc"}
    changed = {"--dynamic-sampling-filter-path": "nonzero_std"}
    text = json.dumps({"started": "", "version": "0", "changed": changed, "data": [facts, held]})
    (run.folder / "run.json").write_text(text)
    dump = SampleDump(run.folder)
    dump.write(0, [sample(run.uid(TRAINED), 0, 1.0, 0), sample(run.uid(TRAINED), 1, 0.0, 0)])
    dump.write(1, [sample(GroupUid("held@abc", 2, 0), 0, 0.5, 1, "eval")])
    dump.close()
    line = {"uid": str(run.uid(QUARANTINED)), "error": "engine: HTTP 500\nand more"}
    (run.folder / "quarantine.jsonl").write_text(json.dumps(line) + "\n")
    metrics = MetricsFile(run.folder)
    times = {"perf/step_time": 2.0, "perf/rollout_time": 1.5, "perf/train_time": 0.25, "perf/publish_time": 0.25}
    metrics.write({**times, "rollout/data_failures": 1.0}, 0)
    metrics.close()
    with TraceFile(run.folder) as trace:
        trace.write("rollout", [WorkSpan(name="rollout", rollout_id=0, start=0, end=1.5)])
        trace.write("train", [WorkSpan(name="update", rollout_id=0, start=1.5, end=1.75)])
        trace.write("publish", [WorkSpan(name="publish", rollout_id=1, start=1.75, end=2.0)])


def asked(capsys: pytest.CaptureFixture[str], run: AsyncRun, what: object) -> dict[str, Any]:
    assert main(["why", str(run.folder), str(what), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert isinstance(facts, dict)
    return facts


def lines_of(run: AsyncRun, uid: GroupUid) -> list[tuple[float, str, str, int]]:
    """The ledger's history of a group, by plain SQL."""
    query = """SELECT time, from_state, to_state, h.attempt FROM history h JOIN groups g USING (admitted)
               JOIN sources s ON s.id = g.source WHERE s.source = ? AND row = ? AND epoch = ? ORDER BY h.id"""
    return list(run.state.ledger._db.execute(query, (uid.source, uid.row, uid.epoch)))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            TRAINED,
            [
                "kept by the filter nonzero_std",
                "train_0 selected it",
                "The step of train_0 trained on it, and made weight version 1; committed",
            ],
        ),
        (DROPPED, ["it was rejected: dull (by the filter nonzero_std)", "In its place the ticket leased {2}."]),
        (FAILED, ["went back to the queue: the attempt failed.", "Attempt 2: train_0", "by domain: 1 data."]),
        (QUARANTINED, ["put into quarantine: infra:engine", "The error: engine: HTTP 500", "leased {5}."]),
        (
            KILLED,
            [
                "leased groups again afterwards, so its rollout worker died",
                "Attempt 2: train_2",
                "no step has selected it yet",
            ],
        ),
        (IN_WORK, ["Attempt 2: train_2 leased it", "has not reported it yet", "It is in work."]),
        (PREFETCHED, ["it was finished", "It is finished, and no step has selected it yet."]),
        (NEVER, ["row 30 of rows.jsonl, in epoch 0", "It was never leased"]),
    ],
)
def test_each_fate_is_told_as_the_ledger_has_it(
    run: AsyncRun, capsys: pytest.CaptureFixture[str], row: int, says: list[str]
) -> None:
    facts, uid = asked(capsys, run, run.uid(row)), run.uid(row)
    told = "\n".join(facts["sentences"])
    for text in says:
        for other in (2, 5):
            text = text.replace(f"{{{other}}}", str(run.uid(other)))
        assert text in told
    entry, history = run.state.ledger.entry(uid), lines_of(run, uid)
    assert (facts["state"], facts["reason"]) == (entry.state, entry.reason)
    leases = [(time, attempt) for time, _, after, attempt in history if after == "leased"]
    assert [(a["leased"], a["attempt"]) for a in facts["attempts"]] == leases
    ends = [(time, after) for time, before, after, _ in history if before == "leased"]
    assert [(a["ended"], a["end"]) for a in facts["attempts"] if a["end"]] == ends
    assert all(shown_time(time) in told for time, _ in leases)
    assert len(facts["attempts"]) + len(ends) + len(facts["later"]) == len(history)


def test_rewards_and_versions_are_those_of_the_samples_and_are_missed_aloud(
    run: AsyncRun, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = asked(capsys, run, run.uid(TRAINED))
    assert facts["record"]["rewards"] == [1.0, 0.0]
    assert "reward 0.5 on average, from 0 to 1, standard deviation 0.5; tokens of weight version 0." in str(facts)
    assert facts["not_recorded"] == []
    assert asked(capsys, run, f"{run.uid(TRAINED)}/1.0") == facts  # as messages name a row of it
    (missing,) = asked(capsys, run, run.uid(PREFETCHED))["not_recorded"]
    assert missing.startswith("its rewards and the weight versions of its tokens")


def test_an_attempt_is_explained_only_if_one_reason_is_left(run: AsyncRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.state.count_failure(run.tickets[3], run.uid(9), "data")
    run.give_back(3, 9)
    run.lease(3, 1)
    run.give_back(3, 9)
    facts = asked(capsys, run, run.uid(9))
    assert [attempt["why"] for attempt in facts["attempts"]] == ["unknown", "unknown"]
    assert facts["not_recorded"][0].startswith("why attempt 1 and 2 went back")
    run.give_back(2, IN_WORK)
    facts = asked(capsys, run, run.uid(IN_WORK))
    assert [attempt["why"] for attempt in facts["attempts"]] == ["begun again", "not needed"]
    assert "train_2 leased no group afterwards" in facts["sentences"][2]


def test_a_prompt_of_an_evaluation_is_told_by_version(run: AsyncRun, capsys: pytest.CaptureFixture[str]) -> None:
    facts = asked(capsys, run, "held@abc:2:0")
    assert (facts["kind"], facts["attempts"]) == ("evaluation", [])
    assert "Evaluated with version 1 (samples.jsonl): 1 row, reward 0.5 on average" in str(facts["sentences"])
    assert asked(capsys, run, "held@abc:3:0")["not_recorded"] != []


def test_a_foreign_group_that_became_too_old_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = AsyncRun(tmp_path / "run", per_step=2, target=1, bound=1)
    for number, groups in enumerate([{10: 0, 11: 0}, {12: 1, 13: 1}, {FOREIGN.row: 0, 14: 1, 15: 1}]):
        run.generate(number)
        for row, version in groups.items():
            columns: dict[str, Any] = {
                "tokens": [np.zeros(2, np.int32)],
                "loss_mask": [np.ones(1, np.float32)],
                "weight_version": np.asarray([version], np.int32),
            }
            uid = GroupUid("theirs", row, 0)
            run.state.finish(run.tickets[number], uid, 0, [RowId(uid, 0)], columns)
        run.end(number)
        run.close(number)
        run.publish(number + 1)
    facts = asked(capsys, run, FOREIGN)
    assert (facts["kind"], facts["state"], facts["reason"]) == ("foreign", "rejected", "too_old")
    assert "its tokens were older than --max-staleness allows" in str(facts["sentences"])
    assert "trained" in asked(capsys, run, GroupUid("theirs", 14, 0))["state"]
    run.state.ledger.close()


def test_a_restart_of_the_buffer_is_told_of_the_group_and_of_its_step(
    run: AsyncRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.restart()
    facts = asked(capsys, run, run.uid(IN_WORK))
    assert facts["attempts"][-1]["end"] == "pending"
    assert "the Buffer began again with the ledger" in facts["sentences"][2]
    assert any("the Buffer began again" in line for line in asked(capsys, run, 2)["restarts"])


def test_a_step_has_its_times_waits_groups_drops_and_failures(
    run: AsyncRun, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = asked(capsys, run, 0)
    assert facts["phases"] == {"rollout": 1.5, "train": 0.25, "publish": 0.25}
    assert facts["waits"]["train"] == {"rollout": 1.5, "publish": 0.25}
    assert facts["trained"] == [str(run.uid(0)), str(run.uid(2))]
    assert (facts["weight_version"], facts["tickets"], facts["leased"], facts["requeued"]) == (1, [0], 4, 1)
    assert facts["dropped"] == {"dull": 1}
    assert facts["failures"] == {"rollout/data_failures": 1.0}
    assert "The longest phase was rollout, 75%." in facts["sentences"][0]
    assert facts["not_recorded"] == []
    assert asked(capsys, run, "train_0") == facts


def test_a_step_in_work_says_what_is_missing(run: AsyncRun, capsys: pytest.CaptureFixture[str]) -> None:
    facts = asked(capsys, run, 2)
    assert (facts["in_work"], facts["trained"]) == (1, [])
    assert "It has not selected its groups, and no process of this machine writes the ledger" in str(facts)
    assert len(facts["not_recorded"]) == 2


@pytest.mark.parametrize("what", ["nothing", "SOURCE:4:0", "SOURCE:400:0", "17", "train_17"])
def test_what_the_run_does_not_have_is_an_error_with_what_it_has(
    run: AsyncRun, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    what = what.replace("SOURCE:400", f"{run.source}:400")
    assert main(["why", str(run.folder), what]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "the run has no" in err
    assert ("a step from 0 to 0" if "17" in what else "SOURCE:ROW:EPOCH of a group of the run, such as") in err


def test_it_writes_nothing_into_the_folder(run: AsyncRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.folder.iterdir() if not path.name.endswith("-shm")}
    for what in (run.uid(0), 0):
        assert main(["why", str(run.folder), str(what)]) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert "Not recorded" not in capsys.readouterr().out


def line(row: int, before: str, after: str, time: float = 0.0) -> tuple[GroupUid, Transition]:
    transition = Transition(
        time=time,
        before=GroupState(before),
        after=GroupState(after),
        attempt=1,
        rollout_id=0,
        reason="",
        step=None,
        incarnation=1,
    )
    return GroupUid("s", row, 0), transition


def test_a_replacement_is_certain_if_one_place_was_free_and_one_of_several_else() -> None:
    lease, drop = ("pending", "leased"), ("leased", "rejected")
    one = [line(0, *lease), line(0, *drop), line(5, *lease), line(5, *drop), line(6, *lease)]
    assert [uid.row for uid in replacements(one, GroupUid("s", 0, 0))] == [5]
    assert [uid.row for uid in replacements(one, GroupUid("s", 5, 0))] == [6]
    two = [line(0, *lease), line(1, *lease), line(0, *drop), line(1, *drop), line(2, *lease), line(3, *lease)]
    assert [uid.row for uid in replacements(two, GroupUid("s", 1, 0))] == [2, 3]
    again = [line(0, *lease), line(1, *lease), line(0, "leased", "pending"), line(1, *drop), line(0, *lease)]
    assert replacements(again, GroupUid("s", 1, 0)) == []
    more = [*again, line(4, *lease), line(5, *lease)]
    assert [uid.row for uid in replacements(more, GroupUid("s", 1, 0))] == [4]


def test_attempts_end_where_the_lease_does() -> None:
    lines = [line(0, "pending", "leased", 1.0), line(0, "leased", "finished", 2.0), line(0, "finished", "pending", 3.0)]
    attempts, later = split_attempts([transition for _, transition in lines])
    assert [(a.leased, a.ended, a.end) for a in attempts] == [(1.0, 2.0, "finished")]
    assert [transition.time for transition in later] == [3.0]


def test_the_failure_that_put_a_group_into_quarantine_explains_no_other_attempt() -> None:
    def attempts(*ends: str) -> list[str]:
        life = GroupLife(uid=GroupUid("s", 0, 0), failures={"data": 2})
        life.attempts = [Attempt(attempt=n, ticket=0, leased=n, opening=1, end=end) for n, end in enumerate(ends)]
        explain_requeues(life)
        return [attempt.why for attempt in life.attempts]

    assert attempts("pending", "pending", "quarantined") == ["unknown", "unknown", ""]
    assert attempts("pending", "quarantined") == ["failed", ""]
    assert attempts("pending", "pending", "finished") == ["failed", "failed", ""]


def test_the_nearest_uids_have_the_source_then_the_epoch_then_the_row() -> None:
    uids = [GroupUid("abc", row, epoch) for row in (1, 5, 9) for epoch in (0, 1)] + [GroupUid("xyz", 6, 1)]
    assert nearest(uids, "abc:6:1", 2) == [GroupUid("abc", 5, 1), GroupUid("abc", 9, 1)]
    assert nearest(uids, "xyz", 1) == [GroupUid("xyz", 6, 1)]


def test_changes_of_engines_are_those_of_the_time_of_the_step() -> None:
    lines = ["2026-01-01 10:00:00 engine 0: a -> b", "2026-01-01 10:00:09 engine 0: b -> c", "no time"]
    start = datetime(2026, 1, 1, 10, 0, 0).timestamp()
    assert engine_changes(lines, start + 0.5, start + 5) == lines[:1]
    assert engine_changes(lines, start + 1.5, start + 20) == lines[1:2]
