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
"""The ledger's note of the process that writes it."""
_BESIDE = ("", "-wal", "-shm")  # the database, and what SQLite has beside one that was not closed


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


def ledger_writer(path: Path) -> int | None:
    """The id of the process of this machine that writes the ledger; None where it is gone, or not there yet."""
    if not path.exists():
        return None
    audit = LedgerAudit(path)
    try:
        process = int(audit.facts().get(f"{NOTE}{PID}", 0))
    finally:
        audit.close()
    try:
        os.kill(process, 0)
    except (ProcessLookupError, PermissionError):  # gone, and perhaps its number is somebody else's by now
        return None
    return process or None


def _check(path: Path, flag: str) -> None:
    try:
        check_local_disk(path)
    except ConfigError as error:
        raise ConfigError(
            error.what, where=f"{flag} {path.parent}", expected=error.expected, hint="add --ledger-dir PATH on one"
        ) from error


def _set_aside(path: Path) -> None:
    """A Buffer of the run before that is still alive keeps its file, whatever the name of it."""
    if path.is_symlink():
        path.unlink()
        return
    if not path.exists():  # a start that failed before it had a ledger: the one that is kept stays
        return
    for suffix in _BESIDE:
        old, kept = Path(f"{path}{suffix}"), Path(f"{path}.previous{suffix}")
        kept.unlink(missing_ok=True)
        if old.exists():
            os.replace(old, kept)
