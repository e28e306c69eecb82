"""Live runs of a tiny task in processes of their own, for killing parts of them: the Buffer, a trainer rank, the
driver.

A run is compared with an undisturbed one: its parameters bit by bit, its ledger group by group.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.cluster.fork_server import SOCKET_VARIABLE
from buffer_rl.errors import CheckpointError, DeadlineError
from buffer_rl.options.section import compose, dump_args
from buffer_rl.testing.tiny import make_tiny_model
from harness.processes import descendants

WORDS = ("ab", "ba", "abc", "bca", "cab", "acb", "bb", "cc")
GROUPS = 3
_LAUNCH = """
import sys
from pathlib import Path
from buffer_rl.options.section import load_args
from buffer_rl.driver.launch import launch_training
from buffer_rl.plugin.registry import PluginRegistry
launch_training(load_args(Path(sys.argv[1]).read_text()), PluginRegistry())
"""


def make_task(folder: Path) -> None:
    """Put ``model``, ``train.jsonl`` and a reward that a random model earns something of into the folder."""
    make_tiny_model(folder / "model", characters="abc=", hidden_size=32, intermediate_size=48)
    rows = [{"prompt": f"{word}=", "label": word[::-1]} for word in WORDS]
    (folder / "letters.py").write_text("def count_a(args, sample):\n    return sample.response.count('a')\n")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_options(folder: Path, name: str, steps: int, **changes: Any) -> Any:
    """Options of a deterministic run ``folder/name`` on the task in ``folder``; ``changes`` replace any of them."""
    options: dict[str, Any] = {
        "run_dir": str(folder / name),
        "prompt_data": str(folder / "train.jsonl"),
        "hf_checkpoint": str(folder / "model"),
        "num_rollout": steps,
        "rollout_batch_size": GROUPS,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 6,
        "custom_rm_path": f"{folder / 'letters.py'}:count_a",
        "lr": 1e-2,
        "logger": [],
        "progress": "none",
        "engine_max_running_requests": 16,
        "engine_context_length": 64,
        "deterministic": True,
    }
    return compose(CORE_SECTIONS)(**{**options, **changes})


class LiveRun:
    """A run whose driver is another process. Its output is in ``run_dir/driver.log``."""

    def __init__(self, args: Any) -> None:
        self.folder = Path(args.run_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        options = self.folder / "options.json"
        options.write_text(dump_args(args))
        with (self.folder / "driver.log").open("ab") as log:
            command = [sys.executable, "-c", _LAUNCH, str(options)]
            own = {name: value for name, value in os.environ.items() if name != SOCKET_VARIABLE}
            self.driver = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log, env=own)

    def wait(self, timeout_s: float) -> int:
        """The driver's exit status, once it has ended."""
        return self.driver.wait(timeout_s)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether ``condition`` came to hold before the run ended. Raises DeadlineError."""
        deadline = time.monotonic() + timeout_s
        while self.driver.poll() is None:
            if condition():
                return True
            if time.monotonic() > deadline:
                raise DeadlineError(f"nothing happened within {timeout_s:g} s", where=str(self.folder))
            time.sleep(0.02)
        return False

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than the run lives."""
        end = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() > end, seconds + 60)

    def kill(self, victim: str, number: int = 0) -> bool:
        """Kill ``driver``, ``rank``, ``buffer``, ``rollout``, ``storage`` or ``engine``, as ``kill -9`` does; of
        several the one of that number, or the last. Returns whether it was there."""
        if victim == "driver":
            self.driver.kill()
            return True
        titles = {"rank": "ray::TrainRank", "buffer": "ray::BufferActor", "rollout": "ray::RolloutWorker"}
        titles |= {"storage": "ray::StorageActor", "engine": "buffer_rl.embedded.server"}
        found = [process.pid for process in descendants(self.driver.pid) if titles[victim] in process.command]
        for pid in found[number : number + 1] or found[-1:]:
            os.kill(pid, signal.SIGKILL)
        return bool(found)

    def last_output(self) -> str:
        """The end of its output."""
        return (self.folder / "driver.log").read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        """End the driver, if it has not."""
        if self.driver.poll() is None:
            self.driver.terminate()
            self.driver.wait(60)


def newest_step(saves: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    return max((int(path.name[5:]) for path in saves.glob("step_*")), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Weights and accounting of a run or a checkpoint. ``faults``: what its ledger has against the accounting.
    ``num_made_again``: finished groups that went back to pending."""

    weights: Mapping[str, bytes]
    trained: frozenset[str]
    faults: tuple[str, ...]
    num_made_again: int = 0

    @classmethod
    def of(cls, folder: Path, num_trained: int) -> Outcome:
        """What the folder of a run or of a checkpoint holds. num_trained: how many groups it must have trained."""
        faults: list[str] = []
        trained: frozenset[str] = frozenset()
        try:
            audit = LedgerAudit(folder / FILE_NAME)
        except CheckpointError as error:
            return cls(weights={}, trained=trained, faults=(str(error),))
        faults += audit.faults()
        states = audit.states()
        trained = frozenset(str(uid) for uid, state in states if state is GroupState.TRAINED)
        again = [line for uid, _ in states for line in audit.history(uid) if line.before is GroupState.FINISHED]
        if len(trained) != num_trained:
            faults.append(f"{len(trained)} groups are trained, {num_trained} were to be")
        for epoch in audit.epochs():
            if sum(epoch.counts.values()) != epoch.num_rows:
                faults.append(f"the counts of epoch {epoch.epoch} add up to {sum(epoch.counts.values())}")
        audit.close()
        tensors = load_file(folder / "hf" / "model.safetensors")
        return cls(
            weights={name: array.tobytes() for name, array in tensors.items()},
            trained=trained,
            faults=tuple(faults),
            num_made_again=sum(line.after is GroupState.PENDING for line in again),
        )

    def differs(self, other: Outcome) -> list[str]:
        """What is wrong with this outcome, where ``other`` is the right one."""
        wrong = list(self.faults)
        if self.weights != other.weights:
            wrong.append("the parameters differ")
        if self.trained != other.trained:
            wrong.append("other groups were trained")
        return wrong
