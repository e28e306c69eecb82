"""What agents were answered: kept so that a play that was killed from outside is played again with the same answers.

``agents.sqlite`` in the run's folder, or in ``--ledger-dir``; all rollout workers of a node write it. A turn is in it
before its client has the answer, so ``kill -9`` loses no answer that an agent has seen (WAL, ``synchronous=NORMAL``, as
the ledger). There are two facts:

- *turns*: what was sampled, under sample, play, digest of what was asked, and ordinal; the prompt only in the digest.
- *plays*: which play of a sample is the next one, how often it was killed, and whether it runs.

**Which turns are replayed.** All tokens of a turn must be of the version that was published when its group was leased
anew, ``SampleGroup.version``. A turn of several versions is never replayed, and is not written. The number of a version
names the same weights until the run's processes start again from a checkpoint: step s + 1 may then have other bits. So
turns belong to a ``RunStart``. Those of an earlier start are forgotten when a worker of the next one opens the file.
Only those of the checkpoint's own step stay, if the start before wrote that checkpoint, or began with it. A worker of
the earlier start that is still there changes nothing from then on. Nor does one after its driver's death, if it can see
it: what fails there fails because the run's engines are gone.

**Which deaths count.** A play that a worker began and never ended was killed with the worker. A play that is cancelled
in a worker that lives (a sibling failed, the Buffer died, the rollout has enough groups) was not, nor one that ended
with all processes of the run. It is the same play in any case; but the second time that it was killed counts as its own
failure, since it may be the cause.

**How long.** A play ends before its group is finished, and the Buffer may die after that and have the group made again.
So turns stay until two later versions were leased. Those of the newest two checkpoints, to which a restart may go back,
stay longer. Each turn that is written removes some of those that are not needed, so the file keeps its size. Plays that
failed or were killed stay for 100 versions.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl.agents.turns import Turn
from buffer_rl.args import Args
from buffer_rl.buffer.ledger_audit import process_note
from buffer_rl.buffer.ledger_file import check_local_disk, place_of
from buffer_rl.cluster.locality import machine_id
from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import Sample, VersionSpan
from buffer_rl.rollout.context import RolloutContext, RunStart
from buffer_rl.rollout.lease import Lease

_log = logging.getLogger(__name__)
FILE_NAME = "agents.sqlite"
BUSY_TIMEOUT_S = 10.0
KILLS = 2
"""The death from outside, of one play, that counts as a failure of its own: the play may cause them."""
REMOVED = 8
"""Turns that are not needed any more, and are removed with each that is written."""
PLAYS_KEPT = 100
"""Versions for which a play that failed is remembered."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS starts (name TEXT NOT NULL, origin TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS plays (
    sample TEXT PRIMARY KEY,
    play INTEGER NOT NULL,
    kills INTEGER NOT NULL,
    running TEXT NOT NULL,
    version INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (
    id INTEGER PRIMARY KEY,
    sample TEXT NOT NULL,
    play INTEGER NOT NULL,
    digest BLOB NOT NULL,
    ordinal INTEGER NOT NULL,
    version INTEGER NOT NULL,
    start TEXT NOT NULL,
    output_ids BLOB NOT NULL,
    log_probs BLOB NOT NULL,
    kept BLOB,
    experts BLOB,
    ending TEXT NOT NULL,
    UNIQUE (sample, play, digest, ordinal)
);
CREATE INDEX IF NOT EXISTS turns_by_version ON turns (version);
"""
_OWN = "EXISTS (SELECT 1 FROM starts WHERE name = ?)"  # a worker that outlived its start changes nothing
# running: the start whose worker plays it; empty if it ended, or was cancelled by a worker that lives.
_RUNS = f"INSERT OR REPLACE INTO plays SELECT ?, ?, ?, ?, ? WHERE {_OWN}"
_ENDED = f"DELETE FROM plays WHERE sample = ? AND {_OWN}"
_FORGET = f"DELETE FROM plays WHERE version < ? AND running = '' AND {_OWN}"
_COLUMNS = "sample, play, digest, ordinal, version, start, output_ids, log_probs, kept, experts, ending"
_WRITE = f"INSERT OR REPLACE INTO turns ({_COLUMNS}) SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ? WHERE {_OWN}"
_READ = (
    "SELECT digest, ordinal, output_ids, log_probs, kept, experts, ending FROM turns "
    "WHERE sample = ? AND play = ? AND +version = ? AND start = ?"  # "+": not by the index of versions
)
_REMOVE = (
    "DELETE FROM turns WHERE id IN (SELECT id FROM turns WHERE version < ? AND version NOT IN (?, ?) "
    f"LIMIT {REMOVED}) AND {_OWN}"
)
_Key = tuple[str, int]


class Journal:
    """The file, as one worker has it open. Belongs to the worker's event loop.

    If the disk refuses a write, that is logged once, and the journal is left: nothing is replayed then."""

    def __init__(self, path: Path, start: RunStart, save_interval: int | None = None) -> None:
        self._path, self._start, self._save_interval = path, start, save_interval
        self._driver = start.driver if start.machine == machine_id() else ""
        self._newest = start.version
        self._has_old = True
        self._db: sqlite3.Connection | None = None
        try:
            self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
            self._begin()
        except sqlite3.Error as error:
            self._leave(error)

    @classmethod
    def of(cls, context: RolloutContext) -> Journal | None:
        """That of the run; None outside of one, and on a network file system, where SQLite has no shared memory."""
        if context.run_dir is None or context.start is None:
            return None
        args: Args = context.args
        path = place_of(FILE_NAME, context.run_dir, args.ledger_dir)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            check_local_disk(path)
        except (ConfigError, OSError) as error:
            _log.warning("no turn is replayed after a death: %s has no local disk (%s)", path.parent, error)
            return None
        return cls(path, context.start, args.save_interval if args.save else None)

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def begin(self, sample: str, version: int) -> tuple[int, int, bool]:
        """Note that a play of ``sample`` begins. Returns which one, how often it was killed, and whether the one before
        was: it began under this start, and never ended."""
        if version > self._newest:
            self._newest, self._has_old = version, True
            self._write(_FORGET, version - PLAYS_KEPT)
        found, _ = self._execute("SELECT play, kills, running FROM plays WHERE sample = ?", sample)
        play, kills, running = found[0] if found else (0, 0, "")
        was_killed = running == self._start.name
        if was_killed:
            play, kills = after_kill(play, kills)
        self._write(_RUNS, sample, play, kills, self._start.name, version)
        return play, kills, was_killed

    def note(self, sample: str, play: int, kills: int, version: int, *, runs: bool) -> None:
        """Note which play of ``sample`` runs, or is the next one."""
        if runs or play or kills:
            self._write(_RUNS, sample, play, kills, self._start.name if runs else "", version)
        else:
            self._write(_ENDED, sample)

    def record(self, sample: str, play: int, turn: Turn, version: int) -> None:
        """Write a turn of one weight version; see the module."""
        spans = [(span.start, span.end) for span in turn.spans]
        ending: list[Any] = [turn.finish_reason, turn.matched, spans]
        kept = experts = None
        if turn.kept is not None:
            kept = array("q", map(len, turn.kept)).tobytes() + b"".join(turn.kept)
        if turn.experts is not None:
            experts = turn.experts.tobytes()
            ending += [turn.experts.dtype.str, turn.experts.shape, turn.experts_start]
        identity = (sample, play, bytes.fromhex(turn.digest), turn.ordinal, version, self._start.name)
        sampled = (array("I", turn.output_ids).tobytes(), array("d", turn.log_probs).tobytes())
        self._write(_WRITE, *identity, *sampled, kept, experts, json.dumps(ending))
        if self._has_old:
            interval = self._save_interval
            saved = self._newest - self._newest % interval if interval else self._newest
            self._has_old = self._write(_REMOVE, self._newest - 1, saved, saved - (interval or 0)) > 0

    def turns(self, sample: str, play: int, version: int, needs: Sequence[str] = ()) -> dict[_Key, tuple[Any, ...]]:
        """What ``turn_of`` makes the turns of a play of, by digest and ordinal; those of ``version`` alone. needs: the
        columns that they must have: a run that is resumed may replay what it did not note before."""
        query = _READ + "".join(f" AND {column} IS NOT NULL" for column in needs)
        found, _ = self._execute(query, sample, play, version, self._start.name)
        return {(digest.hex(), ordinal): (version, *values) for digest, ordinal, *values in found}

    def _begin(self) -> None:
        """Forget what is not of this start; the first of its workers does it. One that is late, whose driver is dead,
        leaves the file to the next start."""
        assert self._db is not None
        start = self._start
        self._db.execute("BEGIN IMMEDIATE")
        if self._is_over():
            self.close()
            return
        if "experts" not in {name for _, name, *_ in self._db.execute("PRAGMA table_info (turns)")}:
            self._db.execute("ALTER TABLE turns ADD COLUMN experts BLOB")  # the run began with an older release
        found = self._db.execute("SELECT name, origin FROM starts").fetchall()
        if [start.name] != [name for name, _ in found]:
            known = {origin for _, origin in found} | {f"{name}:{start.version}" for name, _ in found}
            version = start.version if start.origin in known else -1
            self._db.execute("DELETE FROM turns WHERE version != ?", (version,))
            self._db.execute("UPDATE turns SET start = ?", (start.name,))
            self._db.execute("UPDATE plays SET running = ''")
            if version < 0:
                self._db.execute("DELETE FROM plays")
            self._db.execute("DELETE FROM starts")
            self._db.execute("INSERT INTO starts VALUES (?, ?)", (start.name, start.origin))
        self._db.execute("COMMIT")

    def _execute(self, statement: str, *values: Any) -> tuple[list[Any], int]:
        """The rows that it gives, and how many it changed."""
        try:
            if self._db is not None:
                done = self._db.execute(statement, values)
                return done.fetchall(), done.rowcount
        except sqlite3.Error as error:
            self._leave(error)
        return [], 0

    def _write(self, statement: str, *values: Any) -> int:
        """Returns how many rows it changed. The last value of each statement is the start that the file must be of."""
        return 0 if self._is_over() else self._execute(statement, *values, self._start.name)[1]

    def _is_over(self) -> bool:
        """Whether the driver is dead; False if it is on another machine."""
        return bool(self._driver) and process_note(int(self._driver.split()[0])) != self._driver

    def _leave(self, error: sqlite3.Error) -> None:
        self.close()
        _log.warning("no turn is replayed after a death from now on: %s: %s", self._path, error)


def after_kill(play: int, kills: int) -> tuple[int, int]:
    """Which play follows one that was killed from outside, and how often it was killed before."""
    return (play, kills + 1) if kills + 1 < KILLS else (play + 1, 0)


def turn_of(prompt_ids: Sequence[int], digest: str, ordinal: int, values: tuple[Any, ...]) -> Turn:
    """The turn that was recorded as ``values``."""
    version, ids, log_probs, kept, experts, ending = values
    finish_reason, matched, spans, *form = json.loads(ending)
    output_ids = tuple(array("I", ids))
    return Turn(
        prompt_ids=tuple(prompt_ids),
        output_ids=output_ids,
        log_probs=tuple(array("d", log_probs)),
        spans=tuple(VersionSpan(version, start, end) for start, end in spans),
        kept=None if kept is None else _split(kept, len(output_ids)),
        experts=None if experts is None else np.frombuffer(experts, dtype=form[0]).reshape(form[1]),
        experts_start=0 if experts is None else form[2],
        finish_reason=finish_reason,
        matched=matched,
        digest=digest,
        ordinal=ordinal,
    )


def _split(kept: bytes, count: int) -> tuple[bytes, ...]:
    ends = accumulate(array("q", kept[: 8 * count]), initial=8 * count)
    return tuple(kept[start:end] for start, end in pairwise(ends))


@dataclass(slots=True, kw_only=True)
class Play:
    """One play of a sample, and after a death or a failure the next one.

    number: of the play, from 0; seeds depend on it. kills: how often it was killed from outside. was_killed: whether
    the worker of the play before died in it. sample: what the journal knows the sample by, an evaluation's under its
    own name, since it plays the same samples time and again. version: the one published at the lease; None if unknown,
    and nothing is replayed then.
    """

    number: int = 0
    kills: int = 0
    was_killed: bool = False
    sample: str = ""
    version: int | None = None
    journal: Journal | None = None
    _turns: dict[_Key, Turn | tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def begun(cls, journal: Journal | None, lease: Lease, sample: Sample) -> Play:
        """The play of ``sample`` that begins now. Without a journal its predecessors are unknown."""
        version = None if lease.group is None else lease.group.version
        if journal is None or lease.ticket is None or version is None:
            return cls(version=version)
        own = f"{lease.ticket.task}|" if lease.evaluation else ""
        name = f"{own}{lease.context.seed}|{sample.uid}|{sample.sample_index}"
        number, kills, was_killed = journal.begin(name, version)
        play = cls(number=number, kills=kills, was_killed=was_killed, sample=name, version=version, journal=journal)
        args = lease.context.args
        asked = {"kept": args.replay_kept_tokens, "experts": args.replay_routed_experts}
        needs = [column for column, is_asked in asked.items() if is_asked and not lease.evaluation]
        play._turns.update(journal.turns(name, number, version, needs))
        return play

    def find(self, prompt_ids: Sequence[int], digest: str, ordinal: int) -> Turn | None:
        """The recorded turn with this identity; None if there is none that may be replayed."""
        found = self._turns.get((digest, ordinal))
        return found if found is None or isinstance(found, Turn) else turn_of(prompt_ids, digest, ordinal, found)

    def record(self, turn: Turn) -> None:
        """Keep ``turn``, before anyone has its answer."""
        version = self.version if not turn.spans else turn.spans[0].version
        if self.version is None or version is None or any(span.version != version for span in turn.spans):
            return
        if version == self.version:
            self._turns[turn.digest, turn.ordinal] = turn
        if self.journal is not None:
            self.journal.record(self.sample, self.number, turn, version)

    def kill(self) -> bool:
        """It was killed from outside and is played again. Returns whether that counts as its own failure."""
        before = self.number
        self._go_on(*after_kill(self.number, self.kills))
        return self.number > before

    def fail(self) -> None:
        """It failed by itself: the next play has seeds of its own, and no recorded turn."""
        self._go_on(self.number + 1, 0)

    def end(self) -> None:
        """It ended, or was cancelled, which is no death. A later lease of the sample plays it with the same answers."""
        self._note(runs=False)

    def _go_on(self, number: int, kills: int) -> None:
        if number > self.number:
            self._turns.clear()
        self.number, self.kills = number, kills
        self._note(runs=True)

    def _note(self, *, runs: bool) -> None:
        if self.journal is not None:
            assert self.version is not None
            self.journal.note(self.sample, self.number, self.kills, self.version, runs=runs)
