"""Where a run's ledger is, and what becomes of the one before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer import ledger_place
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_place import ledger_writer, new_ledger
from buffer_rl.buffer.sqlite_ledger import SqliteLedger
from buffer_rl.config import compose
from buffer_rl.errors import CheckpointError, ConfigError
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.types import GroupUid

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
    old = SqliteLedger(first.path, run=first.run)
    old.lease(UID, 0)
    if is_closed:
        old.close()
    second = new_ledger(options(tmp_path))
    assert (second.path, second.path) == (first.path, str(tmp_path / "ledger.sqlite"))
    new = SqliteLedger(second.path, run=second.run)
    assert new.num_admitted == 0
    assert num_groups(tmp_path / "ledger.sqlite.previous") == 1
    if not is_closed:
        old.finish(UID, 1)  # it is alive, and does no harm
        old.close()
    assert new.num_admitted == 0
    new.close()
    with pytest.raises(CheckpointError, match="of run"):
        SqliteLedger(second.path, run=first.run)
    new_ledger(options(tmp_path))
    assert num_groups(tmp_path / "ledger.sqlite.previous") == 0
    new_ledger(options(tmp_path))  # a start that failed before it had a ledger takes nothing away
    assert num_groups(tmp_path / "ledger.sqlite.previous") == 0


def test_in_a_folder_of_its_own_it_is_found_in_the_runs_folder_too_and_runs_do_not_meet(tmp_path: Path) -> None:
    places = [new_ledger(options(tmp_path / name / "run", tmp_path / "local")) for name in ("a", "b")]
    assert len({place.path for place in places}) == 2
    for place, name in zip(places, ("a", "b"), strict=True):
        assert Path(place.path).parent == tmp_path / "local"
        ledger = SqliteLedger(place.path, run=place.run)
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

    monkeypatch.setattr(ledger_place, "check_local_disk", is_network)
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
    ledger = SqliteLedger(place.path, run=place.run)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    found = []
    for process in (os.getpid(), ended.pid):
        ledger.remember("pid", str(process))
        found.append(ledger_writer(Path(place.path)))
    ledger.close()
    assert found == [os.getpid(), None]
