"""Where the ledger of a run is: in the run's folder, or in a local folder that the user names."""

from __future__ import annotations

import hashlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_file import FILE_NAME, check_local_disk
from buffer_rl.buffer.sqlite_ledger import NOTE
from buffer_rl.errors import ConfigError

PID = "pid"
"""The ledger's note of the process that writes it, as ``process_note`` has it."""
_LOG, _INDEX = "-wal", "-shm"  # what SQLite has beside a database that was not closed
_STARTED = 19  # the 22nd field of /proc/PID/stat, counted from the third: the two before it may hold spaces


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPlace:
    """The ledger's file, and the name of the run that it is of: a Buffer that is restarted finds both again."""

    path: str
    run: str


def new_ledger(args: Any) -> LedgerPlace:
    """Make room for the ledger of a run that begins, in ``args.run_dir`` or ``args.ledger_dir``. Call it on the
    Buffer's node, by whoever has the run's folder to itself.

    The ledger of the run before is kept as ``ledger.sqlite.previous``: a run never goes on with it by itself, only with
    a checkpoint's copy. Where the file is elsewhere, ``run_dir/ledger.sqlite`` is a link to it.
    Raises ConfigError if the folder cannot hold a ledger.
    """
    run_dir = Path(args.run_dir).absolute()
    flag = "--run-dir" if args.ledger_dir is None else "--ledger-dir"
    link = run_dir / FILE_NAME
    path = link
    if args.ledger_dir is not None:
        digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:8]  # runs may share the folder
        path = Path(args.ledger_dir).absolute() / f"{run_dir.name}-{digest}.{FILE_NAME}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check(path, flag)
        _set_aside(path)
        if path != link:
            run_dir.mkdir(parents=True, exist_ok=True)
            _set_aside(link)
            link.symlink_to(path)
    except OSError as error:
        raise ConfigError(f"the ledger cannot be made: {error}", where=flag) from error
    return LedgerPlace(path=str(path), run=uuid.uuid4().hex)


def process_note(process: int) -> str | None:
    """The process as ``ID START``, where START is when it began, in ticks since the machine did: the two are never
    another process's. None where there is no such process, or no ``/proc``."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return f"{process} {status.rpartition(')')[2].split()[_STARTED]}"


def ledger_writer(path: Path) -> int | None:
    """The id of the process of this machine that writes the ledger; None where it is gone, or not there yet, or cannot
    be told from another one that has its number by now."""
    if not path.exists():
        return None
    audit = LedgerAudit(path)
    try:
        note = audit.facts().get(f"{NOTE}{PID}", "")
    finally:
        audit.close()
    process = int(note.split()[0]) if note else 0
    return process if process > 0 and process_note(process) == note else None


def _check(path: Path, flag: str) -> None:
    try:
        check_local_disk(path)
    except ConfigError as error:
        raise ConfigError(
            error.what, where=f"{flag} {path.parent}", expected=error.expected, hint="add --ledger-dir PATH on one"
        ) from error


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
    for orphan in (log, index):  # of a database that somebody removed
        orphan.unlink(missing_ok=True)
