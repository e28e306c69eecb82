"""The runs of a drill: each is ``buffer-rl train`` in a process of its own, watched by what it writes. The small model
that they have in place of a large one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.cluster.fork_server import SOCKET_VARIABLE
from buffer_rl.errors import CheckpointError, ConfigError, DeadlineError, raised_as
from buffer_rl.observe.metrics import METRICS_FILE
from buffer_rl.observe.run_folder import records_in

POLL_S = 0.02
LIMIT_S = 900.0
"""For a run, its start included, and for anything that is awaited of it."""
LARGEST_BYTES = 100_000_000
"""Of the weights of a model that a drill takes as it is."""
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
END_S = 60.0
"""For a run that was asked to end."""


class DrillRun:
    """A run in ``folder``, which is its ``--run-dir``; what it prints is in ``output``. process: its driver."""

    def __init__(self, folder: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self.folder, self.output = folder, folder.with_suffix(".log")
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "buffer_rl", "train", *arguments, "--run-dir", str(folder)]
        # Its processes are its own: none is made by the server of a process that this one was started by.
        own = {name: value for name, value in environ.items() if name != SOCKET_VARIABLE}
        with self.output.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=own
            )

    def steps(self) -> list[dict[str, float]]:
        """The metrics of its trained steps so far, in the order in which they were trained."""
        return [line for line in records_in(self.folder, METRICS_FILE) if "perf/step_time" in line]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = LIMIT_S) -> bool:
        """Whether ``condition`` came to hold before the run ended. Raises DeadlineError."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            if condition():
                return True
            if time.monotonic() > deadline:
                raise DeadlineError(f"nothing happened within {timeout_s:g} s", where=str(self.output))
            time.sleep(POLL_S)
        return condition()

    def trains_on(self, num_steps: int) -> bool:
        """Whether it trained more steps than that before it ended. Raises DeadlineError."""
        return self.wait_until(lambda: len(self.steps()) > num_steps)

    def pause(self, seconds: float) -> None:
        """Let it run for so long."""
        end = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() > end, seconds + LIMIT_S)

    def wait(self) -> int:
        """Its exit status. Raises DeadlineError."""
        self.wait_until(lambda: self.process.poll() is not None)
        return self.process.wait()

    def stop(self) -> None:
        """End the run, if it has not."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def last_lines(self) -> str:
        """The end of what it printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-12:])


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
        with closing(LedgerAudit(folder / FILE_NAME)) as audit:
            faults, states = audit.faults(), audit.states()
        with raised_as(CheckpointError, "the model is not there", OSError, where=str(folder / "hf")):
            files = [load_file(file) for file in sorted((folder / "hf").glob("*.safetensors"))]
        return cls(
            weights={name: array.tobytes() for file in files for name, array in file.items()},
            trained=frozenset(str(uid) for uid, state in states if state is GroupState.TRAINED),
            quarantined=sum(state is GroupState.QUARANTINED for _, state in states),
            doubled=tuple(fault for fault in faults if "was trained" in fault),
            faults=tuple(fault for fault in faults if "was trained" not in fault),
        )


AGAIN, UNUSED, COUNTED = "tried again", "not used", "trained or dropped at the first attempt"
"""What became of a group whose reward failed once; the last one is wrong."""
_USED = (GroupState.TRAINED, GroupState.REJECTED)


def fates(ledger: Path, marks: Sequence[tuple[str, str]]) -> dict[str, Counter[str]]:
    """By kind of fault, what became of the groups that met it, in the ledger of the run; empty if there is none."""
    found: dict[str, Counter[str]] = {}
    if not ledger.exists():
        return found
    with closing(LedgerAudit(ledger)) as audit:
        uids = {str(uid): uid for uid, _ in audit.states()}
        for name, kind in sorted(marks, key=lambda mark: mark[1]):
            lines = audit.history(uids[name]) if name in uids else []
            attempts = [line.attempt for line in lines if line.after in _USED]
            fate = UNUSED if not attempts else AGAIN if attempts[-1] > 1 else COUNTED
            found.setdefault(kind, Counter())[fate] += 1
    return found


def is_small(folder: Path) -> bool:
    """Whether a drill takes the model as it is."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= LARGEST_BYTES


def write_small(source: Path, target: Path) -> None:
    """Write random weights in ``SIZES`` for the architecture of the folder ``source``, and its tokenizer, into the
    folder ``target``. Raises ConfigError if transformers cannot build it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    for name, size in SIZES.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(size, getattr(config, name)))
    if isinstance(layers := getattr(config, "layer_types", None), list):
        config.layer_types = layers[: config.num_hidden_layers]
    try:
        torch.manual_seed(0)
        factory: Any = AutoModelForCausalLM
        factory.from_config(config).to(torch.float32).save_pretrained(target)
    except Exception as error:  # fault boundary: many architectures
        what = f"no small {config.model_type} can be made: {type(error).__name__}: {error}"
        hint = "--drill-model own, or a small --hf-checkpoint"
        raise ConfigError(what, where="--drill-model small", hint=hint) from error
    for file in source.iterdir():
        is_weight = file.suffix in (".safetensors", ".bin", ".pth") or file.name.endswith(".index.json")
        if file.is_file() and not is_weight and not (target / file.name).exists():
            shutil.copy(file, target / file.name)
