"""What is checked of a ledger's file before it is used."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest

from buffer_rl.buffer import ledger_file
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_file import check_local_disk, open_for_reading
from buffer_rl.errors import BufferRLError, CheckpointError, ConfigError
from buffer_rl.records.groups import GroupUid

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/local\\040disk tmpfs rw 0 0
s3fs /mnt/bucket fuse.s3fs rw 0 0
overlay /mnt/layers fuse.fuse-overlayfs rw 0 0
store /mnt/twice ext4 rw 0 0
store /mnt/twice lustre rw 0 0
server:a /mnt/line\u2028end nfs rw 0 0
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger of 2,000 groups, closed."""
    ledger = Ledger(tmp_path / "ledger.sqlite", run="r")
    with ledger.transaction():
        for row in range(2000):
            ledger.lease(GroupUid("s", row, 0), 0)
    ledger.close()
    return tmp_path / "ledger.sqlite"


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    size = len(content)
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("not a database, but long enough to be read as one\n" * 100)
    elif kind == "cut within a page":
        path.write_bytes(content[: size // 2 + 100])
    elif kind == "cut at a page":
        path.write_bytes(content[: size // 2 // 4096 * 4096])
    elif kind == "header":
        path.write_bytes(b"X" + content[1:])
    elif kind == "schema":
        path.write_bytes(content[:100] + bytes(3996) + content[4096:])
    else:
        path.write_bytes(
            content[: size // 2 // 4096 * 4096] + b"\xff" * 4096 + content[size // 2 // 4096 * 4096 + 4096 :]
        )


@pytest.mark.parametrize(
    "kind", ["empty", "text", "cut within a page", "cut at a page", "header", "schema", "a page of ones"]
)
def test_a_damaged_file_is_refused_and_left_as_it_is(path: Path, kind: str) -> None:
    damage(path, kind)
    before = path.read_bytes()
    for reader in (lambda: Ledger(path, run="r"), lambda: LedgerAudit(path), lambda: open_for_reading(path)):
        with pytest.raises(CheckpointError, match=r"ledger\.sqlite.*damaged"):
            reader()
    assert path.read_bytes() == before


def test_a_log_that_was_cut_is_read_up_to_the_cut(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", run="r")
    for row in range(20):
        ledger.lease(GroupUid("s", row, 0), 0)
    content, log = ((tmp_path / f"ledger.sqlite{suffix}").read_bytes() for suffix in ("", "-wal"))
    ledger.close()
    admitted = []
    for size in (*range(0, len(log), 5000), len(log)):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "ledger.sqlite").write_bytes(content)
        (folder / "ledger.sqlite-wal").write_bytes(log[:size])
        again = Ledger(folder / "ledger.sqlite", run="r")
        admitted.append(again.num_admitted)
        assert again.recover() == [GroupUid("s", row, 0) for row in range(again.num_admitted)]
        again.close()
        audit = LedgerAudit(folder / "ledger.sqlite")
        assert audit.faults() == []
        audit.close()
    assert admitted == sorted(admitted)
    assert (admitted[0], len(set(admitted))) == (0, 21)


def test_a_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE notes (text)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="is not a ledger"):
        Ledger(path, run="r")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_ledger_of_another_version_is_refused(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(CheckpointError, match="version 99"):
        Ledger(path, run="r")


def test_a_file_that_cannot_be_made_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        Ledger(tmp_path / "no folder" / "ledger.sqlite", run="r")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BufferRLError, match="folder"):
        Ledger(tmp_path / "folder", run="r")
    with pytest.raises(CheckpointError, match="no such ledger"):
        open_for_reading(tmp_path / "nothing")


def read_without_permission(folder: Path) -> str:
    """What somebody reads, or is told, who may read the ledger in the folder and write to nothing there."""
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:  # whom no permission holds up
            os.setgid(65534)
            os.setuid(65534)
        try:
            said = str(len(LedgerAudit(folder / "ledger.sqlite").states()))
        except BaseException as error:  # whatever it is, the parent looks at it
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    folder.chmod(0o755)
    with open(reading) as pipe:
        return pipe.read()


def test_who_may_not_write_to_the_folder_reads_a_closed_ledger_and_is_not_told_of_damage_in_another_one() -> None:
    # Not in pytest's folder, which nobody else may enter.
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folder = Path(name, "run")
        folder.mkdir()
        ledger = Ledger(folder / "ledger.sqlite", run="r")
        ledger.lease(GroupUid("s", 0, 0), 0)
        open_one = Path(name, "killed")
        shutil.copytree(folder, open_one)
        (open_one / "ledger.sqlite-shm").unlink()  # as after a copy of what a killed run left
        ledger.close()
        assert read_without_permission(folder) == "1"
        said = read_without_permission(open_one)
        assert said.startswith(f"CheckpointError: {open_one / 'ledger.sqlite'}: the ledger cannot be read: ")
        assert "damaged" not in said
        assert "--load" not in said


def test_a_ledger_that_another_process_holds_is_not_called_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_TIMEOUT_S", 0.01)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    for reader in (lambda: Ledger(path, run="r"), lambda: open_for_reading(path)):
        with pytest.raises(CheckpointError, match="cannot be read: database is locked") as caught:
            reader()
        assert "another process holds it" in caught.value.hint
    holder.close()
    open_for_reading(path).close()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/run/ledger.sqlite", None),
        ("/home/me/ledger.sqlite", "nfs4"),
        ("/homes/ledger.sqlite", None),
        ("/home/local disk/ledger.sqlite", None),
        ("/mnt/bucket/ledger.sqlite", "fuse.s3fs"),
        ("/mnt/layers/ledger.sqlite", None),
        ("/mnt/twice/ledger.sqlite", "lustre"),
        ("/mnt/line\u2028end/ledger.sqlite", "nfs"),
    ],
)
def test_network_file_systems_are_refused(tmp_path: Path, path: str, kind: str | None) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    if kind is None:
        check_local_disk(Path(path), str(mounts))
    else:
        with pytest.raises(ConfigError, match=f"cannot be on {kind}, a network file system"):
            check_local_disk(Path(path), str(mounts))
    check_local_disk(Path(path), str(tmp_path / "absent"))


def test_of_many_that_make_the_file_at_once_the_last_one_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    context = multiprocessing.get_context("fork")
    start = context.Barrier(6)
    children = [context.Process(target=_open_at_once, args=(path, start), daemon=True) for _ in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=60)
    assert [child.exitcode for child in children] == [0] * 6
    audit = LedgerAudit(path)
    assert (audit.facts()["restarts"], audit.faults()) == ("6", [])
    audit.close()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def _open_at_once(path: Path, start: object) -> None:
    start.wait(timeout=30)  # type: ignore[attr-defined]
    Ledger(path, run="r").close()
