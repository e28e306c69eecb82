"""Where a run's ledger is, and what becomes of the one before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer import ledger_file
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit, ledger_writer, process_note
from buffer_rl.buffer.ledger_file import LedgerPlace, new_ledger
from buffer_rl.errors import CheckpointError, ConfigError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid

UID = GroupUid("s", 1, 0)


def options(run_dir: Path, ledger_dir: Path | None = None) -> Any:
    return compose(CORE_SECTIONS)(run_dir=str(run_dir), ledger_dir=ledger_dir and str(ledger_dir))


def num_groups(path: Path) -> int:
    audit = LedgerAudit(path)
    try:
        return len(audit.states())
    finally:
        audit.close()


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_new_run_in_a_folder_begins_anew_and_the_ledger_of_the_run_before_is_kept(
    tmp_path: Path, is_closed: bool
) -> None:
    first = new_ledger(options(tmp_path))
    old = Ledger(first.path, run=first.run)
    old.lease(UID, 0)
    if is_closed:
        old.close()
    second = new_ledger(options(tmp_path))
    assert (second.path, second.path) == (first.path, str(tmp_path / "ledger.sqlite"))
    new = Ledger(second.path, run=second.run)
    assert new.num_admitted == 0
    assert num_groups(tmp_path / "ledger.sqlite.previous") == 1
    if not is_closed:
        old.finish(UID, 1)  # it is alive, and does no harm
        old.close()
    assert new.num_admitted == 0
    new.close()
    with pytest.raises(CheckpointError, match="of run"):
        Ledger(second.path, run=first.run)
    new_ledger(options(tmp_path))
    assert num_groups(tmp_path / "ledger.sqlite.previous") == 0
    new_ledger(options(tmp_path))  # a start that failed before it had a ledger takes nothing away
    assert num_groups(tmp_path / "ledger.sqlite.previous") == 0


def test_in_a_folder_of_its_own_it_is_found_in_the_runs_folder_too_and_runs_do_not_meet(tmp_path: Path) -> None:
    places = [new_ledger(options(tmp_path / name / "run", tmp_path / "local")) for name in ("a", "b")]
    assert len({place.path for place in places}) == 2
    for place, name in zip(places, ("a", "b"), strict=True):
        assert Path(place.path).parent == tmp_path / "local"
        ledger = Ledger(place.path, run=place.run)
        ledger.lease(UID, 0)
        assert num_groups(tmp_path / name / "run" / "ledger.sqlite") == 1
        ledger.close()
    again = new_ledger(options(tmp_path / "a" / "run", tmp_path / "local"))
    assert again.path == places[0].path
    assert not os.path.exists(again.path)
    assert num_groups(Path(f"{again.path}.previous")) == 1
    here = new_ledger(options(tmp_path / "a" / "run"))
    assert here.path == str(tmp_path / "a" / "run" / "ledger.sqlite")
    assert not os.path.lexists(here.path), "the link is gone"


def test_a_network_file_system_is_refused_with_the_option_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_network(path: Path) -> None:
        raise ConfigError("the ledger cannot be on nfs4, a network file system", expected="a local disk")

    monkeypatch.setattr(ledger_file, "check_local_disk", is_network)
    with pytest.raises(ConfigError) as caught:
        new_ledger(options(tmp_path))
    assert caught.value.where == f"--run-dir {tmp_path}"
    assert "--ledger-dir" in caught.value.hint


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        new_ledger(options(tmp_path / "run", tmp_path / "file" / "below"))
    assert caught.value.where == "--ledger-dir"


def test_the_writer_is_the_process_that_the_ledger_notes_while_it_runs(tmp_path: Path) -> None:
    place = new_ledger(options(tmp_path))
    assert ledger_writer(Path(place.path)) is None, "it is not there yet"
    ledger = Ledger(place.path, run=place.run)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert process_note(ended.pid) is None, "it is dead, though nobody has asked for its status"
    ended.wait()
    own = process_note(os.getpid())
    assert own is not None
    began = int(own.split()[1])
    notes = {
        own: os.getpid(),
        f"{os.getpid()} {began - 1}": None,  # an earlier process with the number of this one
        str(os.getpid()): None,
        f"{ended.pid} {began}": None,
        "1 0": None,
    }
    found = {}
    for note in notes:
        ledger.remember("pid", note)
        found[note] = ledger_writer(Path(place.path))
    ledger.close()
    assert found == notes
    assert process_note(ended.pid) is None


def killed_run(place: LedgerPlace, groups: int) -> None:
    """A Buffer that commits and is killed: what it wrote is in the log beside the database."""
    child = os.fork()
    if child == 0:
        ledger = Ledger(place.path, run=place.run)
        uids = [GroupUid("s", row, 0) for row in range(groups)]
        for uid in uids:
            ledger.finish(uid, ledger.lease(uid, 0))
        ledger.commit(uids, 0, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_log_whose_database_was_removed_is_not_replayed_into_the_new_one(tmp_path: Path) -> None:
    place = new_ledger(options(tmp_path))
    killed_run(place, 3)
    assert Path(f"{place.path}-wal").stat().st_size > 0
    os.unlink(place.path)
    again = new_ledger(options(tmp_path))
    ledger = Ledger(again.path, run=again.run)
    assert (ledger.commits(), ledger.num_admitted) == ({}, 0)
    ledger.close()


@pytest.mark.parametrize("is_second", [False, True])
def test_wherever_a_start_is_cut_off_the_next_one_begins_anew_and_keeps_the_whole_ledger_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_second: bool
) -> None:
    number, was_cut = 0, True
    while was_cut:
        number += 1
        folder = tmp_path / str(number)
        if is_second:  # there is a kept one of an earlier run, with a log
            killed_run(new_ledger(options(folder)), 5)
        killed_run(new_ledger(options(folder)), 3)
        with monkeypatch.context() as patch:
            left = [number]
            for name in ("replace", "unlink"):
                patch.setattr(os, name, cutting(getattr(os, name), left))
            try:
                new_ledger(options(folder))
                was_cut = False
            except Cut:
                pass
        place = new_ledger(options(folder))
        ledger = Ledger(place.path, run=place.run)
        assert (ledger.commits(), ledger.num_admitted) == ({}, 0)
        ledger.close()
        assert num_groups(folder / "ledger.sqlite.previous") == 3
        audit = LedgerAudit(folder / "ledger.sqlite.previous")
        assert (len(audit.commits()), audit.faults()) == (1, [])
        audit.close()
    assert number > 4


class Cut(BaseException):
    """The end of a process, as far as its own code can tell."""


def cutting(call: Callable[..., None], left: list[int]) -> Callable[..., None]:
    """The call, which ends the process in place of the ``left``-th of all such calls."""

    def made(*args: object, **options: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Cut
        call(*args, **options)

    return made
