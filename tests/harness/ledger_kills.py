"""Kills a process that writes a ledger at random moments, and compares what is left with what it acknowledged.

A child works through the groups of an endless data source: it leases, finishes, rejects, requeues and commits, and
reports each commit to its parent after the call has returned. The parent kills it with SIGKILL after a random time,
checks the accounting, and starts the next one on the same file. From time to time the parent makes a copy of the
ledger, and goes back to it later, as a run does that resumes from a checkpoint; where an attempt number is given again,
the fencing token of the lease from before must not be the ledger's. At the end of a round a last child works everything
off.

duplicated: acknowledged as trained twice, or trained twice by the history. missing: acknowledged and not trained, or
never worked off.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.errors import CheckpointError
from buffer_rl.records.groups import GroupUid

RUN = "kills"
ROWS = 500  # of an epoch
GROUPS_PER_STEP = 8
KILLS_PER_ROUND = 50  # then a new file: the checks after each kill grow with it
LONGEST_LIFE_S = 0.04
LAST_LIFE_S = 60.0
_DONE = (GroupState.TRAINED, GroupState.REJECTED, GroupState.QUARANTINED)
_Late = dict[tuple[int, int], str]


@dataclass(slots=True, kw_only=True)
class KillReport:
    """What happened in all rounds. groups: how many were worked off."""

    kills: int = 0
    groups: int = 0
    commits: int = 0
    restores: int = 0
    repeated_attempts: int = 0
    duplicated: int = 0
    missing: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def violations(self) -> int:
        """Everything that must not be."""
        return self.duplicated + self.missing + len(self.faults)


def kill_at_random(
    folder: Path, num_kills: int, *, seed: int = 0, limit_s: float = 1e9, ledger: type[Ledger] = Ledger
) -> KillReport:
    """Kill ``num_kills`` children, or as many as fit into ``limit_s``, with files in ``folder``. It stops after the
    first round with a violation."""
    report, rng, end = KillReport(), random.Random(seed), time.monotonic() + limit_s
    while report.kills < num_kills and time.monotonic() < end and not report.violations:
        path = folder / f"round_{report.kills}"
        path.mkdir(parents=True)
        _Round(path, ledger, report, rng).run(min(KILLS_PER_ROUND, num_kills - report.kills), end)
        shutil.rmtree(path)
    return report


def uid_of(number: int) -> GroupUid:
    """The ``number``-th group of the data source."""
    return GroupUid("kills", number % ROWS, number // ROWS)


class _Round:
    def __init__(self, folder: Path, kind: type[Ledger], report: KillReport, rng: random.Random) -> None:
        self.path, self.copy = folder / "ledger.sqlite", folder / "copy.sqlite"
        self.kind, self.report, self.rng = kind, report, rng
        self.trained: set[int] = set()
        self.trained_in_copy: set[int] | None = None
        self.leases: _Late = {}  # those of the lineage that was left at a restore

    def run(self, num_kills: int, end: float) -> None:
        for _ in range(num_kills):
            if time.monotonic() > end:
                break
            self.live(self.rng.uniform(0, LONGEST_LIFE_S))
            self.report.kills += 1
            self.check()
            if self.rng.random() < 0.1 and self.path.exists():
                self.copy_or_restore()
        self.live(LAST_LIFE_S, drain=True)
        self.check(drained=True)

    def live(self, seconds: float, *, drain: bool = False) -> None:
        """One child, killed after ``seconds``; one that drains ends by itself."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _child(self.path, self.kind, writer, self.rng.random(), self.leases, drain)
        os.close(writer)
        received, until = b"", time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
            if not (block := os.read(reader, 1 << 16)):
                break
            received += block
            if received.endswith(b"end\n"):
                break
        os.kill(child, signal.SIGKILL)  # it is not reaped yet, so that the number is still its own
        while block := os.read(reader, 1 << 16):
            received += block
        os.close(reader)
        os.waitpid(child, 0)
        self.read_lines(received.decode().splitlines(keepends=True), drain)

    def read_lines(self, lines: list[str], drain: bool) -> None:
        whole = [line.split() for line in lines if line.endswith("\n")]
        for kind, *values in whole:
            if kind == "T":
                numbers = {int(value) for value in values}
                self.report.duplicated += len(numbers & self.trained)
                self.report.commits += 1
                self.trained |= numbers
            elif kind == "L":
                self.leases.setdefault((int(values[0]), int(values[1])), values[2])
            elif kind == "late":
                self.report.repeated_attempts += 1
            elif kind == "E":
                self.report.faults.append(" ".join(values))
        if drain and ["end"] not in whole:
            self.report.faults.append("the last child did not come to its end")

    def check(self, *, drained: bool = False) -> None:
        try:
            audit = LedgerAudit(self.path)
        except CheckpointError as error:
            if self.trained or drained:
                self.report.faults.append(str(error))
            return
        rows = audit.states()
        found = {uid.row + ROWS * uid.epoch: state for uid, state in rows}
        self.report.faults += audit.faults()
        audit.close()
        now = {number for number, state in found.items() if state is GroupState.TRAINED}
        self.report.missing += len(self.trained - now)
        if len(now - self.trained) not in (0, GROUPS_PER_STEP) and not drained:
            self.report.faults.append(f"{len(now - self.trained)} groups were trained and not acknowledged")
        self.trained = now
        if drained:
            self.report.groups += len(found)
            self.report.missing += sum(found.get(number) not in _DONE for number in range(len(found)))

    def copy_or_restore(self) -> None:
        """Make a copy of the ledger, or go back to the one that there is."""
        ledger = self.kind(self.path, run=RUN)
        if self.trained_in_copy is None:
            ledger.backup(self.copy)
            self.trained_in_copy = set(self.trained)
            self.leases.clear()
        else:
            ledger.restore(self.copy)
            self.trained = self.trained_in_copy
            self.trained_in_copy = None
            self.report.restores += 1
        ledger.close()


def _child(path: Path, kind: type[Ledger], writer: int, seed: float, late: _Late, drain: bool) -> None:
    """Work until killed. Never returns."""
    try:
        ledger = kind(path, run=RUN)
        for line in _work(ledger, random.Random(seed), late, drain):
            os.write(writer, line.encode() + b"\n")
        os.write(writer, b"end\n")
        while True:  # the parent kills it
            signal.pause()
    except BaseException:  # the boundary of the process: the parent reports it
        os.write(writer, ("E " + traceback.format_exc().replace("\n", " | ") + "\n").encode())
    finally:
        os._exit(1)


def _work(ledger: Ledger, rng: random.Random, late: _Late, drain: bool) -> Iterator[str]:
    """Acknowledgements, each after the call that it is about."""
    queue = [uid.row + ROWS * uid.epoch for uid in ledger.recover()]
    admitted, rollout_id = ledger.num_admitted, max(ledger.commits(), default=-1) + 1
    finished: list[int] = []
    attempts: dict[int, int] = {}
    last = -(-admitted // ROWS) * ROWS  # a drain ends with the epoch
    while not drain or queue or finished or admitted < last:
        if not queue and not (drain and admitted >= last):
            queue, admitted = [admitted], admitted + 1
        if queue:
            number = queue.pop(0)
            attempts[number] = ledger.lease(uid_of(number), rollout_id)
            if former := late.get((number, attempts[number])):
                yield _repeated_attempt(ledger, number, former)
            yield f"L {number} {attempts[number]} {ledger.fencing_token}"
            chance = rng.random()
            if chance < 0.05:
                ledger.reject(uid_of(number), attempts[number], "zero_std")
            elif chance < 0.07:
                ledger.quarantine(uid_of(number), attempts[number], "poison")
            elif chance < 0.15:
                ledger.requeue(uid_of(number), attempts[number])
                queue.append(number)
            else:
                ledger.finish(uid_of(number), attempts[number])
                finished.append(number)
        if len(finished) == GROUPS_PER_STEP or (drain and finished and not queue and admitted >= last):
            ledger.commit([uid_of(number) for number in finished], rollout_id, rollout_id + 1)
            yield "T " + " ".join(map(str, finished))
            finished, rollout_id = [], rollout_id + 1


def _repeated_attempt(ledger: Ledger, number: int, former: str) -> str:
    """A report with the same attempt of a lease from before: the fencing token alone tells it apart."""
    return f"E the token {former} of group {number} is the ledger's again" if former == ledger.fencing_token else "late"
