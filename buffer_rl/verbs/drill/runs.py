"""The runs of a drill: each is ``buffer-rl train`` in a process of its own, watched by what it writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from safetensors.numpy import load_file

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.cluster.fork_server import SOCKET_VARIABLE
from buffer_rl.errors import CheckpointError, DeadlineError
from buffer_rl.observe.metrics import METRICS_FILE
from buffer_rl.observe.run_folder import records_in
from buffer_rl.verbs.drill.faults import PHASES

POLL_S = 0.02
END_S = 60.0
"""For a run that was asked to end."""


class DrillRun:
    """A run in ``folder``, which is its ``--run-dir``; what it prints is in ``output``."""

    def __init__(self, folder: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self.folder, self.output = folder, folder.with_suffix(".log")
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "buffer_rl", "train", *arguments, "--run-dir", str(folder)]
        # Its processes are its own: none is made by the server of a process that this one was started by.
        own = {name: value for name, value in environ.items() if name != SOCKET_VARIABLE}
        with self.output.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=own
            )

    @property
    def driver(self) -> int:
        """Its process id."""
        return self._process.pid

    def steps(self) -> list[dict[str, float]]:
        """The metrics of its trained steps so far, in the order in which they were trained."""
        return [line for line in records_in(self.folder, METRICS_FILE) if "perf/step_time" in line]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether ``condition`` came to hold before the run ended. Raises DeadlineError."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if condition():
                return True
            if time.monotonic() > deadline:
                raise DeadlineError(f"nothing happened within {timeout_s:g} s", where=str(self.output))
            time.sleep(POLL_S)
        return condition()

    def wait(self, timeout_s: float) -> int:
        """Its exit status. Raises DeadlineError."""
        self.wait_until(lambda: self._process.poll() is not None, timeout_s)
        return self._process.wait()

    def kill(self) -> None:
        """Kill the driver, as ``kill -9`` does."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End the run, if it has not."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def last_lines(self, number: int = 12) -> str:
        """The end of what it printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-number:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to. weights: of the model that it wrote, by name. trained: groups. doubled, faults: what the
    ledger has against the accounting, the former for groups that were trained twice."""

    weights: Mapping[str, bytes]
    trained: frozenset[str]
    quarantined: int
    doubled: tuple[str, ...]
    faults: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path) -> Outcome:
        """What the folder of an ended run holds. Raises CheckpointError if its ledger or model cannot be read."""
        audit = LedgerAudit(folder / FILE_NAME)
        try:
            faults = audit.faults()
            states = list(audit.states())
        finally:
            audit.close()
        try:
            files = [load_file(file) for file in sorted((folder / "hf").glob("*.safetensors"))]
        except OSError as error:
            raise CheckpointError(f"the model is not there: {error}", where=str(folder / "hf")) from error
        return cls(
            weights={name: array.tobytes() for file in files for name, array in file.items()},
            trained=frozenset(str(uid) for uid, state in states if state is GroupState.TRAINED),
            quarantined=sum(state is GroupState.QUARANTINED for _, state in states),
            doubled=tuple(fault for fault in faults if "was trained" in fault),
            faults=tuple(fault for fault in faults if "was trained" not in fault),
        )


def usual_step(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each metric that tells how long a phase takes, over all steps but the first."""
    names = {*PHASES.values(), "perf/step_time"}
    later = steps[1:] or steps
    return {name: median(values) for name in names if (values := [step[name] for step in later if name in step])}


AGAIN, UNUSED, COUNTED = "tried again", "not used", "trained or dropped at the first attempt"
"""What became of a group whose reward failed once; the last one is wrong."""
_USED = (GroupState.TRAINED, GroupState.REJECTED)


def reward_marks(folder: Path) -> list[tuple[str, str]]:
    """The groups that met a fault of the reward, with its kind."""
    names = [path.name.rsplit(".", 2) for path in folder.iterdir()]
    return [(uid, kind) for uid, _, kind in names]


def fates(ledger: Path, marks: Sequence[tuple[str, str]]) -> dict[str, Counter[str]]:
    """By kind of fault, what became of the groups that met it, in the ledger of the run."""
    found: dict[str, Counter[str]] = {}
    audit = LedgerAudit(ledger)
    try:
        uids = {str(uid): uid for uid, _ in audit.states()}
        for name, kind in marks:
            lines = audit.history(uids[name]) if name in uids else []
            attempts = [line.attempt for line in lines if line.after in _USED]
            fate = UNUSED if not attempts else AGAIN if attempts[-1] > 1 else COUNTED
            found.setdefault(kind, Counter())[fate] += 1
    finally:
        audit.close()
    return found
