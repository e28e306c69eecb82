"""The ledger's file: an SQLite database in WAL mode, its schema, the checks before it is used, where a run has it, and
its copies.

``synchronous=NORMAL``. A transaction is in the WAL, that is in the kernel's page cache, before its call returns, so
that ``kill -9`` of the process loses nothing that was acknowledged. A power loss may lose the last transactions, but
never half of one, and never corrupts the file. That is enough: a power loss takes this node's part of the run with it,
which then goes on from a checkpoint, and the ledger in a checkpoint is flushed to disk (``write_backup``).
``synchronous=FULL`` would pay a flush of the disk for every transition to save facts that no weights belong to.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from buffer_rl.errors import BufferStateError, CheckpointError, ConfigError, raised_as
from buffer_rl.files.checkpoint import sync_path

if TYPE_CHECKING:
    from buffer_rl.args import Args


FILE_NAME = "ledger.sqlite"
IN_MEMORY = ":memory:"
NOTE = "note:"  # begins the keys of the facts that are notes
SCHEMA_VERSION = 1
APPLICATION_ID = 0x42524C47  # "BRLG": what `file` and SQLite show of a file that has no name any more
BUSY_TIMEOUT_S = 10.0
"""How long a statement waits for another process that holds the file, such as a copy that is being made."""

# admitted: the running number of the first lease, which the order of the queue goes by: 0, 1, …; of foreign
# groups, which are in no queue, -1, -2, ….
# history.time: seconds since 1970. incarnation: how often the ledger had been opened.
_SCHEMA = (
    "CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE sources (id INTEGER PRIMARY KEY, source TEXT NOT NULL UNIQUE, num_rows INTEGER)",
    """CREATE TABLE groups (
        admitted INTEGER PRIMARY KEY,
        source INTEGER NOT NULL REFERENCES sources (id),
        epoch INTEGER NOT NULL,
        row INTEGER NOT NULL,
        state TEXT NOT NULL
            CHECK (state IN ('pending', 'leased', 'finished', 'trained', 'rejected', 'quarantined')),
        attempt INTEGER NOT NULL,
        rollout_id INTEGER,
        reason TEXT NOT NULL,
        step INTEGER,
        selected INTEGER NOT NULL,
        UNIQUE (source, epoch, row),
        CHECK ((state = 'trained') = (step IS NOT NULL))
    )""",
    # Few groups are under way at a time, and a restart asks for these alone.
    "CREATE INDEX live ON groups (admitted) WHERE state IN ('pending', 'leased', 'finished')",
    "CREATE TABLE commits (rollout_id INTEGER PRIMARY KEY, step INTEGER NOT NULL, num_groups INTEGER NOT NULL)",
    """CREATE TABLE history (
        id INTEGER PRIMARY KEY,
        admitted INTEGER NOT NULL,
        time REAL NOT NULL,
        from_state TEXT NOT NULL,
        to_state TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        rollout_id INTEGER,
        reason TEXT NOT NULL,
        step INTEGER,
        incarnation INTEGER NOT NULL
    )""",
)
TABLES = ("facts", "sources", "groups", "commits", "history")

_HELD = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")
_NO_PERMISSION = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")

# WAL needs memory that all processes on the file share, and network file systems have none.
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smbfs", "smb3", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "ocfs2", "gfs2"}
)
_LOG, _INDEX = "-wal", "-shm"  # what SQLite has beside a database that was not closed
_COPY_BLOCK = 1 << 20
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs"})  # the root of a container without privileges


def open_ledger_file(path: Path) -> sqlite3.Connection:
    """Open the file for its one writer; made where it does not exist, and in memory for ``IN_MEMORY``. A new file gets
    its name when its tables are whole, so that an empty one is a damaged ledger and never a new one.

    Raises ConfigError for a file system that cannot hold it, CheckpointError for a file that is damaged or of another
    kind or version.
    """
    if str(path) == IN_MEMORY:
        db = sqlite3.connect(IN_MEMORY, isolation_level=None, check_same_thread=False)
        _write_schema(db)
        return db
    check_local_disk(path)
    with raised_as(ConfigError, "the ledger cannot be opened", (sqlite3.Error, OSError), where=str(path)):
        if not path.exists():
            _create(path)
        db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA cache_size=-4096")  # 4 MiB: the pages of an epoch or two, and no more in a long run
        check_sound(db, path)
        if db.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
            raise ConfigError("the file system cannot hold a ledger: SQLite refuses WAL mode", where=str(path))
        db.execute("PRAGMA synchronous=NORMAL")
    except BaseException as error:
        db.close()
        if isinstance(error, sqlite3.Error):
            raise read_failed(path, error) from error
        raise
    return db


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a ledger that another process may be writing. Raises CheckpointError as ``open_ledger_file`` does.

    SQLite makes files beside it while it reads. Where it may not, and none are there, no process writes the ledger,
    which is then read without them.
    """
    if not path.is_file():
        raise CheckpointError("there is no such ledger", where=str(path))
    try:
        return _opened(path, "mode=ro")
    except sqlite3.Error as error:
        if _is_refused(error, _NO_PERMISSION) and not os.path.exists(f"{os.path.realpath(path)}-wal"):
            with suppress(sqlite3.Error):
                return _opened(path, "mode=ro&immutable=1")
        raise read_failed(path, error) from error


def _opened(path: Path, how: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        check_sound(db, path)
    except BaseException:
        db.close()
        raise
    return db


def check_sound(db: sqlite3.Connection, path: Path) -> None:
    """Raise CheckpointError unless the database is a ledger of this version whose pages are in order."""
    if path.stat().st_size == 0:
        raise damaged(path, "it is empty")
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise CheckpointError("the file is not a ledger", where=str(path))
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"the ledger has version {version}", where=str(path), expected=str(SCHEMA_VERSION))
    faults = [row[0] for row in db.execute("PRAGMA quick_check(3)")]
    if faults != ["ok"]:
        raise damaged(path, "; ".join(faults))


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a file whose content is wrong."""
    return CheckpointError(
        f"the ledger is damaged: {what}", where=str(path), hint="go on from a checkpoint with --load"
    )


def read_failed(path: Path, error: sqlite3.Error) -> CheckpointError:
    """The error for a file that SQLite did not read: because it is damaged, or for a reason that is not in it."""
    what = f"the ledger cannot be read: {error}"
    if _is_refused(error, _HELD):
        return CheckpointError(what, where=str(path), hint="another process holds it; ask again")
    if _is_refused(error, _NO_PERMISSION):
        hint = f"it takes permission to read it, and to write to {str(path.parent)!r}; or copy it, its -wal included"
        return CheckpointError(what, where=str(path), hint=hint)
    return damaged(path, str(error))


def _is_refused(error: sqlite3.Error, names: tuple[str, ...]) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(names)


def write_failed(path: Path, error: sqlite3.Error) -> BufferStateError:
    """The error for a transition that the disk refused; nothing was changed."""
    hint = "another process holds it" if _is_refused(error, _HELD) else "is its disk full?"
    return BufferStateError(f"the ledger cannot be written: {error}", where=str(path), hint=hint)


def check_local_disk(path: Path, mounts: str = "/proc/mounts") -> None:
    """Raise ConfigError if ``path`` is on a network file system. Without ``/proc/mounts`` nothing is known."""
    try:
        lines = Path(mounts).read_bytes().decode(errors="replace").split("\n")
    except OSError:
        return
    kind = _file_system(path, lines)
    if kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE):
        what = f"the ledger cannot be on {kind}, a network file system"
        hint = "checkpoints, which hold a copy of it, may be anywhere"
        raise ConfigError(what, where=str(path), expected="a local disk of the Buffer's node", hint=hint)


def _file_system(path: Path, mount_lines: Iterable[str]) -> str:
    """The type of the file system that the longest mount point above ``path`` has; the last line wins a tie."""
    target = Path(os.path.realpath(path))
    depth, kind = -1, ""
    for line in mount_lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[1]))  # a space is \040
        if target.is_relative_to(point) and len(point.parts) >= depth:
            depth, kind = len(point.parts), fields[2]
    return kind


def _create(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            _write_schema(db)
            db.execute("PRAGMA journal_mode=WAL")  # those that open it at once would lock each other out of the change
        with suppress(FileExistsError):  # another process was faster
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_schema(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA:
        db.execute(statement)
    db.execute(f"PRAGMA application_id={APPLICATION_ID}")
    db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    db.execute("COMMIT")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPlace:
    """The ledger's file, and the name of the run that it is of: a Buffer that is restarted finds both again."""

    path: str
    run: str


def place_of(name: str, run_dir: Path, ledger_dir: str | None) -> Path:
    """Where a database of the run is: in ``run_dir``, or in ``ledger_dir`` under a name of the run."""
    if ledger_dir is None:
        return run_dir / name
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:8]  # runs may share the folder
    return Path(ledger_dir).absolute() / f"{run_dir.name}-{digest}.{name}"


def new_ledger(args: Args) -> LedgerPlace:
    """Make room for the ledger of a run that begins, in ``args.run_dir`` or ``args.ledger_dir``. The caller is on the
    Buffer's node and has the run's folder to itself.

    The ledger of the run before is kept as ``ledger.sqlite.previous``: a run never goes on with it by itself, only with
    a checkpoint's copy. Where the file is elsewhere, ``run_dir/ledger.sqlite`` is a link to it.
    Raises ConfigError if the folder cannot hold a ledger.
    """
    run_dir = Path(args.run_dir).absolute()
    flag = "--run-dir" if args.ledger_dir is None else "--ledger-dir"
    link = run_dir / FILE_NAME
    path = place_of(FILE_NAME, run_dir, args.ledger_dir)
    with raised_as(ConfigError, "the ledger cannot be made", OSError, where=flag):
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_place(path, flag)
        _set_aside(path)
        if path != link:
            run_dir.mkdir(parents=True, exist_ok=True)
            _set_aside(link)
            link.symlink_to(path)
    return LedgerPlace(path=str(path), run=uuid.uuid4().hex)


def _check_place(path: Path, flag: str) -> None:
    try:
        check_local_disk(path)
    except ConfigError as error:
        hint = "add --ledger-dir PATH on one"
        raise ConfigError(error.what, where=f"{flag} {path.parent}", expected=error.expected, hint=hint) from error


def _set_aside(path: Path) -> None:
    """Rename the ledger to ``.previous``. A Buffer of the run before that is still alive keeps its file, whatever the
    name of it.

    SQLite would replay a log into whatever database it finds beside it. So the log goes first, under a name that no
    database has: wherever this is cut off, the next start finds out how far it came.
    """
    if path.is_symlink():
        path.unlink()
        return
    kept, log_on_its_way = Path(f"{path}.previous"), Path(f"{path}{_LOG}.previous")
    log, index = Path(f"{path}{_LOG}"), Path(f"{path}{_INDEX}")
    # Where it does not exist, a start failed before it had a ledger, and the one that is kept stays.
    if path.exists():
        if not log_on_its_way.exists():
            for suffix in (_LOG, _INDEX, ""):
                Path(f"{kept}{suffix}").unlink(missing_ok=True)
            if log.exists():
                os.replace(log, log_on_its_way)
        os.replace(path, kept)
        if index.exists():
            os.replace(index, f"{kept}{_INDEX}")
    if log_on_its_way.exists():
        os.replace(log_on_its_way, f"{kept}{_LOG}")
    for orphan in (log, index):  # of a database that was removed
        orphan.unlink(missing_ok=True)


def write_backup(db: sqlite3.Connection, path: Path, target: Path) -> None:
    """Copy the database ``db`` of the file ``path``, as of one moment, into the new file ``target``: one file without a
    WAL beside it, flushed to disk. SQLite writes beside ``path``; only whole files go to ``target``, which may be on a
    file system without locks or random writes. Raises CheckpointError if it cannot be written."""
    local, temporary = _beside(path, "backup"), target.with_name(f"{target.name}.tmp")
    try:
        with raised_as(CheckpointError, "the ledger cannot be copied", (sqlite3.Error, OSError), where=str(target)):
            local.unlink(missing_ok=True)  # of a process that was killed
            with closing(sqlite3.connect(local, isolation_level=None)) as copy:
                db.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
            shutil.copyfile(local, temporary)
            sync_path(temporary)
            os.replace(temporary, target)
            sync_path(target.parent)
    finally:
        local.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)


@contextmanager
def local_copy(source: Path, path: Path) -> Iterator[Path]:
    """The ledger ``source``, checked, as a file beside ``path`` for the length of the block. Raises CheckpointError,
    which names the source if that is at fault, and the file beside ``path`` if the disk under it is."""
    local = _beside(path, "restore")
    try:
        _copy(source, local)
        try:
            open_for_reading(local).close()
        except CheckpointError as error:
            raise CheckpointError(error.what, where=str(source)) from error
        yield local
    finally:
        local.unlink(missing_ok=True)


def _beside(path: Path, what: str) -> Path:
    """Where a copy is made: in the folder of the ledger's file, or the system's where the ledger is in memory."""
    if str(path) == IN_MEMORY:
        return Path(tempfile.gettempdir()) / f".{FILE_NAME}.{uuid.uuid4().hex}.{what}"
    return path.with_name(f".{path.name}.{what}")


def _copy(source: Path, target: Path) -> None:
    with _reading(source):
        reading = source.open("rb")
    what = "the copy of the ledger cannot be put beside the run's own"
    hint = f"is its disk full? {str(source)!r} is as it was"
    failed = raised_as(CheckpointError, what, OSError, where=str(target), hint=hint)
    with reading, failed, target.open("wb") as writing:
        while block := _block(reading, source):
            writing.write(block)


def _block(file: BinaryIO, source: Path) -> bytes:
    with _reading(source):
        return file.read(_COPY_BLOCK)


def _reading(source: Path) -> AbstractContextManager[None]:
    return raised_as(CheckpointError, "the copy of the ledger cannot be read", OSError, where=str(source))
