"""The journal's file: what it gives back, which weights its turns are of, what it forgets, and what it survives."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.agents import journal as module
from buffer_rl.agents.journal import FILE_NAME, Journal, Play
from buffer_rl.agents.turns import Turn
from buffer_rl.buffer.ledger_audit import process_note
from buffer_rl.cluster.locality import machine_id
from buffer_rl.records.groups import VersionSpan
from buffer_rl.rollout.context import RunStart
from harness.agent_play import AgentEngine, session_of, user

DIGEST = "ab" * 32
NEEDS: list[tuple[str, ...]] = [(), ("kept",), ("kept", "experts")]


def start(name: str, version: int = 3, origin: str = "") -> RunStart:
    return RunStart(name=name, version=version, origin=origin or f"{name}:began")


def turn(ordinal: int = 0, version: int = 3, **changes: Any) -> Turn:
    given: dict[str, Any] = {
        "prompt_ids": (1, 2),
        "output_ids": (5, 6),
        "log_probs": (-0.1, -1 / 3),
        "spans": (VersionSpan(version, 0, 2),),
        "digest": DIGEST,
        "ordinal": ordinal,
    }
    return Turn(**{**given, **changes})


def play(journal: Journal, version: int = 3, sample: str = "s", number: int = 0) -> Play:
    """A play that knows what the file has."""
    made = Play(number=number, sample=sample, version=version, journal=journal)
    made._turns.update(journal.turns(sample, number, version))
    return made


def has(path: Path, of: RunStart, **where: Any) -> bool:
    journal = Journal(path, of)
    found = play(journal, **where).find((1, 2), DIGEST, 0)
    journal.close()
    return found is not None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"finish_reason": "length", "matched": None},
        {"matched": 1},
        {"matched": "\udc80!"},
        {"log_probs": (-math.inf, -5e-324)},
        {"kept": (b"", b"\x00\xff" * 9)},
        {"output_ids": (), "log_probs": (), "spans": ()},
        {"output_ids": (), "log_probs": (), "spans": (), "kept": ()},
        {"output_ids": (2**32 - 1, 0)},
        {"experts": np.arange(12, dtype=np.int16).reshape(3, 2, 2)},
        {"experts": np.arange(8, dtype=np.uint8).reshape(2, 2, 2), "experts_start": 1},
        {"spans": (VersionSpan(3, 0, 1), VersionSpan(3, 1, 2))},
    ],
)
def test_a_turn_comes_back_as_it_was_written(changes: dict[str, Any], tmp_path: Path) -> None:
    written = turn(**changes)
    journal = Journal(tmp_path / FILE_NAME, start("a"))
    play(journal).record(written)
    journal.close()
    again = play(Journal(tmp_path / FILE_NAME, start("a")))
    found = again.find([1, 2], DIGEST, 0)
    assert found == written
    assert found is not None
    assert found.experts_start == written.experts_start
    assert (found.experts is None) == (written.experts is None)
    if found.experts is not None and written.experts is not None:
        assert (found.experts.dtype, found.experts.tolist()) == (written.experts.dtype, written.experts.tolist())
    for other in (again.find([1, 2], "cd" * 32, 0), again.find([1, 2], DIGEST, 1)):
        assert other is None


def test_a_turn_is_found_under_its_sample_play_and_version_alone(tmp_path: Path) -> None:
    path, of = tmp_path / FILE_NAME, start("a")
    play(Journal(path, of)).record(turn())
    assert has(path, of)
    assert not any(has(path, of, **where) for where in ({"sample": "t"}, {"number": 1}, {"version": 4}))


def test_the_turns_of_a_play_are_found_by_its_name(tmp_path: Path) -> None:
    """And not among all of the version, which takes longer with each turn of a step."""
    Journal(tmp_path / FILE_NAME, start("a")).close()
    plan = sqlite3.connect(tmp_path / FILE_NAME).execute(f"EXPLAIN QUERY PLAN {module._READ}", ("s", 0, 3, "a"))
    assert "sample=? AND play=?" in str(plan.fetchall())


def test_a_turn_of_several_versions_is_never_replayed(tmp_path: Path) -> None:
    path, of = tmp_path / FILE_NAME, start("a")
    mixed = play(Journal(path, of))
    mixed.record(turn(spans=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))))
    assert mixed.find((1, 2), DIGEST, 0) is None
    assert not any(has(path, of, version=version) for version in (3, 4))
    later = play(Journal(path, of))
    later.record(turn(version=4))  # published after the lease
    assert later.find((1, 2), DIGEST, 0) is None
    assert has(path, of, version=4)


STARTS = {
    "the same start": ([start("a")], True),
    "the checkpoint that it wrote": ([start("b", 3, "a:3")], True),
    "its checkpoint, twice": ([start("b", 3, "a:3"), start("c", 3, "a:3")], True),
    "what it began with": ([start("b", 3, "a:began")], True),
    "a checkpoint of another start": ([start("b", 3, "x:3")], False),
    "an older checkpoint that it wrote": ([start("b", 2, "a:2")], False),
    "the older one, then the newer one": ([start("b", 2, "a:2"), start("c", 3, "a:3")], False),
    "a new run in the folder": ([start("b", 0, "other:0")], False),
    "there and back": ([start("b", 3, "x:3"), start("c", 3, "a:3")], False),
}


@pytest.mark.parametrize("case", STARTS)
def test_a_version_is_that_of_the_same_weights_only_if_they_are_of_one_origin(case: str, tmp_path: Path) -> None:
    later, stays = STARTS[case]
    path = tmp_path / FILE_NAME
    play(Journal(path, start("a"))).record(turn())
    for each in later:
        Journal(path, each).close()
    assert has(path, later[-1]) is stays


def test_a_worker_that_outlives_its_start_changes_nothing(tmp_path: Path) -> None:
    """It plays on when its driver is dead and the next one has begun: its failures and answers are not those of the
    run."""
    path, of = tmp_path / FILE_NAME, start("b", 3, "a:3")
    left = Journal(path, start("a"))
    late = [play(left, sample=sample) for sample in ("s", "ended", "other")]
    left.begin("ended", 3)
    worker = Journal(path, of)
    worker.begin("s", 3)
    play(worker).record(turn())
    before = [line for line in sqlite3.connect(path).iterdump() if line.startswith("INSERT")]
    assert len(before) == 4  # a start, two plays, a turn
    for each in late:
        each.record(turn(log_probs=(-9.0, -9.0)))
        each.kill()
        each.fail()
        each.end()
    Play(sample="ended", version=3, journal=left).end()
    left.begin("s", 200)
    assert [line for line in sqlite3.connect(path).iterdump() if line.startswith("INSERT")] == before
    assert worker.begin("s", 3) == (0, 1, True)
    assert has(path, of)


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_what_a_worker_of_this_machine_writes_after_its_drivers_death_is_not_kept(place: str, tmp_path: Path) -> None:
    """What its agents fail of is that the run's engines are gone. A driver that cannot be seen is taken to live."""
    path = tmp_path / FILE_NAME
    driver = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note = process_note(driver.pid)
    assert note is not None
    machine = machine_id() if place == "here" else "another"
    journal = Journal(path, replace(start("a"), machine=machine, driver=note))
    journal.begin("s", 3)
    alive, late = play(journal), play(journal, sample="other")
    alive.record(turn())
    alive.fail()
    driver.kill()
    driver.wait()
    late.record(turn())
    alive.fail()
    journal.close()
    then = Journal(path, start("a"))
    is_seen = place == "here"
    assert then.begin("s", 3)[0] == (1 if is_seen else 2)
    assert (play(then, sample="other").find((1, 2), DIGEST, 0) is None) is is_seen


def test_a_worker_that_comes_after_its_drivers_death_leaves_the_file_to_the_next_start(tmp_path: Path) -> None:
    path, dead = tmp_path / FILE_NAME, f"{os.getpid()} 0"  # this process began later
    worker = Journal(path, start("b"))
    Journal(path, replace(start("a"), machine=machine_id(), driver=dead)).begin("s", 3)
    play(worker).record(turn())
    worker.close()
    assert has(path, start("b"))


def test_a_turn_without_what_the_run_replays_by_now_is_sampled_again(tmp_path: Path) -> None:
    """A resumed run may ask for kept tokens or experts that it did not note before."""
    journal = Journal(tmp_path / FILE_NAME, start("a"))
    play(journal).record(turn())
    play(journal).record(turn(1, kept=(b"", b"")))
    play(journal).record(turn(2, kept=(b"", b""), experts=np.zeros((3, 1, 2), dtype=np.uint8)))
    found = {needs: sorted(ordinal for _, ordinal in journal.turns("s", 0, 3, needs)) for needs in NEEDS}
    assert found == {(): [0, 1, 2], ("kept",): [1, 2], ("kept", "experts"): [2]}


def test_a_worker_that_dies_in_a_play_is_seen_and_the_second_time_the_play_is_the_next_one(tmp_path: Path) -> None:
    path, of = tmp_path / FILE_NAME, start("a")
    begun = [Journal(path, of).begin("s", 3) for _ in range(5)]
    assert begun == [(0, 0, False), (0, 1, True), (1, 0, True), (1, 1, True), (2, 0, True)]


def test_an_end_a_failure_and_a_new_start_are_no_deaths(tmp_path: Path) -> None:
    path, of = tmp_path / FILE_NAME, start("a")
    journal = Journal(path, of)

    def begun(journal: Journal) -> Play:
        number, kills, was_killed = journal.begin("s", 3)
        assert not was_killed
        return Play(number=number, kills=kills, sample="s", version=3, journal=journal)

    begun(journal).end()
    assert sqlite3.connect(path).execute("SELECT count(*) FROM plays").fetchone() == (0,)
    failing = begun(journal)
    failing.fail()
    failing.end()
    again = begun(journal)
    assert again.number == 1
    assert not again.kill()
    after = begun(Journal(path, start("b", 3, "a:3")))
    assert (after.number, after.kills) == (1, 1)
    assert after.kill()
    assert after.number == 2


def test_several_workers_write_one_file(tmp_path: Path) -> None:
    path, of = tmp_path / FILE_NAME, start("a")
    workers = [Journal(path, of) for _ in range(3)]
    for number in range(30):
        play(workers[number % 3], sample=f"s{number}").record(turn())
    assert all(has(path, of, sample=f"s{number}") for number in range(30))


def test_the_file_keeps_its_size_and_the_turns_of_the_newest_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    journal = Journal(path, start("a", 0), save_interval=4)
    sizes = []
    for version in range(23):
        for sample in range(30):
            number, kills, _ = journal.begin(f"{version}/{sample}", version)
            made = Play(number=number, kills=kills, sample=f"{version}/{sample}", version=version, journal=journal)
            made.record(turn(version=version))
            made.fail()
            made.end()
        sizes.append(sqlite3.connect(path).execute("SELECT count(*) FROM turns").fetchone()[0])
    found = sqlite3.connect(path).execute("SELECT DISTINCT version FROM turns ORDER BY version").fetchall()
    assert [version for (version,) in found] == [16, 20, 21, 22]
    assert max(sizes) <= 6 * 30
    assert sqlite3.connect(path).execute("SELECT count(*) FROM plays").fetchone() == (23 * 30,)
    journal.begin("last", module.PLAYS_KEPT + 5)
    assert sqlite3.connect(path).execute("SELECT min(version) FROM plays").fetchone() == (5,)


async def test_a_journal_that_the_disk_refuses_is_left_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILE_NAME
    path.write_text("no database")
    with caplog.at_level(logging.WARNING):
        journal = Journal(path, start("a"))
        assert journal.begin("s", 3) == (0, 0, False)
        play(journal).record(turn())
        play(journal).end()
    assert [record.message.startswith("no turn is replayed") for record in caplog.records] == [True]


async def test_a_marked_repetition_whose_answer_the_journal_has_gets_it() -> None:
    async with session_of(AgentEngine()) as session:
        first = await session.chat(user("a"))
        recorded = Play(version=3)
        recorded.record(first.turn)
    async with session_of(AgentEngine()) as session:
        session._play = recorded
        again = await session.chat(user("a"), known=True)
        assert (again.turn, session.replayed) == (first.turn, 1)
        with pytest.raises(Exception, match="no such request is known"):
            await session.chat(user("a"), known=True)
        assert len(session.exchanges) == 1
