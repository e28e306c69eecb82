"""Step time of the three schedules with an engine and a trainer that really compute, on a core each.

    python benchmarks/schedule_step.py            # about three minutes; needs two cores
    python benchmarks/schedule_step.py --quick    # one step of the last schedule: does everything work?

A Qwen3 of about 1.5 million random parameters, 16 groups of 4 samples a step, with a KL penalty, so that there is
reference work too. The engine process is pinned to one core and the trainer to another; driver, Buffer and rollout
worker share both. A small model that was trained for a minute has no long tail, so the tail is imposed: every response
is as long as a lognormal number that its sampling seed draws, and all schedules decode and train on the same lengths.

The schedules are run in turn, ``--rounds`` times; the first step and the last one of each run are left out. In the
table: seconds a step (median, least, greatest), the median as a share of lockstep's, the share of the streamed work
that lay inside generation, and the share of the step in which engine and trainer had nothing to do (medians).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.session import ray_session
from buffer_rl.driver.launch import launch_training
from buffer_rl.embedded.launcher import EmbeddedEngine, launch
from buffer_rl.kinds.objective import Objective
from buffer_rl.observe.timeline import read_trace
from buffer_rl.observe.timeline_stats import Overlap, StepStats, step_stats, step_windows
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Sample
from buffer_rl.rollout.generate import generate
from buffer_rl.rollout.requests import sampling_seed
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.torch_trainer import TorchTrainer

GROUPS, SAMPLES = 16, 4
MEAN_LENGTH, MAX_LENGTH, SIGMA = 60, 480, 1.0
SCHEDULES: dict[Overlap, dict[str, Any]] = {
    Overlap.LOCKSTEP: {"schedule": "lockstep"},
    Overlap.PIPELINED: {"schedule": "pipelined"},
    Overlap.STREAMED_GRADIENTS: {"schedule": "pipelined", "stream_gradients": True},
}


def core(number: int) -> set[int]:
    """One of the cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[number % len(cores)]}


def launch_pinned(args: Any, index: int, log_path: str) -> EmbeddedEngine:
    """The embedded engine on the first core; its process inherits that of the thread that starts it."""
    before, engine_core = os.sched_getaffinity(0), core(0)
    os.sched_setaffinity(0, engine_core)
    try:
        return launch(args, index, log_path)
    finally:
        os.sched_setaffinity(0, before)


class PinnedTrainer(TorchTrainer):
    """The default trainer, all threads on the second core."""

    def __init__(self, args: Any, rank: int, world_size: int, objective: Objective) -> None:
        trainer_core = core(1)
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), trainer_core)
        super().__init__(args, rank, world_size, objective)


async def respond(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A response of a length that is known before."""
    seed = sampling_seed(args.rollout_seed, sample.row_id.uid, sample.sample_index)
    length = MEAN_LENGTH * math.exp(random.Random(seed).gauss(-(SIGMA**2) / 2, SIGMA))
    tokens = min(max(1, round(length)), MAX_LENGTH)
    return await generate(args, sample, sampling_params | {"max_new_tokens": tokens, "ignore_eos": True})


def rewarded(args: Any, sample: Sample) -> float:
    """Something that differs within a group."""
    return float(sample.response_length % 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Steps of one schedule."""

    kind: Overlap
    steps: list[StepStats]

    @property
    def median(self) -> float:
        """Seconds a step."""
        return statistics.median(step.wall for step in self.steps)

    def line(self, lockstep: float) -> str:
        """Of the table; lockstep: its median."""
        walls = [step.wall for step in self.steps]
        overlap = statistics.median(step.overlap_share or 0.0 for step in self.steps)
        engine = statistics.median(1.0 - step.generation / step.wall for step in self.steps)
        trainer = statistics.median(step.idle.get("train", 1.0) for step in self.steps)
        seconds = f"{self.median:>9.3f}{min(walls):>9.3f}{max(walls):>9.3f}{self.median / lockstep:>10.3f}"
        return f"{self.kind:30}{seconds}{overlap:>9.0%}{engine:>13.0%}{trainer:>14.0%}"


def make_task(folder: Path) -> None:
    """The model, and prompts that are all different."""
    make_tiny_model(
        folder / "model",
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        head_dim=32,
        max_position_embeddings=512,
    )
    rows = (json.dumps({"prompt": f"{number:06d}", "label": ""}) + "\n" for number in range(4096))
    (folder / "train.jsonl").write_text("".join(rows))


def run_schedule(folder: Path, run_dir: Path, kind: Overlap, num_steps: int, groups: int) -> list[StepStats]:
    """The measured steps of one run, of so many groups each."""
    here = Path(__file__).resolve()
    args = compose(CORE_SECTIONS).model_validate(
        {
            "run_dir": str(run_dir),
            "prompt_data": str(folder / "train.jsonl"),
            "hf_checkpoint": str(folder / "model"),
            "rollout_engine": f"{here}:launch_pinned",
            "train_backend": f"{here}:PinnedTrainer",
            "custom_generate_function_path": f"{here}:respond",
            "custom_rm_path": f"{here}:rewarded",
            "num_rollout": num_steps + 2,
            "rollout_batch_size": groups,
            "n_samples_per_prompt": SAMPLES,
            "rollout_max_response_len": MAX_LENGTH,
            "engine_max_running_requests": groups * SAMPLES,
            "use_kl_loss": True,
            "kl_loss_coef": 0.01,
            "lr": 1e-5,
            "max_tokens_per_gpu": 2048,
            "train_device": "cpu",
            "engine_device": "cpu",
            "logger": [],
            "progress": "none",
            **SCHEDULES[kind],
        }
    )
    launch_training(args, PluginRegistry())  # type: ignore[arg-type]
    spans = read_trace(run_dir)
    windows = step_windows(spans)
    return [step_stats(spans, step, windows[step], kind) for step in range(1, num_steps + 1)]


def measure(folder: Path, num_steps: int, rounds: int, groups: int, schedules: Sequence[Overlap]) -> list[Measured]:
    """Every schedule in turn, several times."""
    steps: dict[Overlap, list[StepStats]] = {kind: [] for kind in schedules}
    for number in range(rounds):
        for place, kind in enumerate(schedules):
            steps[kind] += run_schedule(folder, folder / f"run_{number}_{place}", kind, num_steps, groups)
    return [Measured(kind=kind, steps=found) for kind, found in steps.items()]


def table(measured: Sequence[Measured]) -> list[str]:
    """Heading and one line a schedule."""
    columns = f"{'median s':>9}{'min':>9}{'max':>9}{'/lockstep':>10}"
    heading = f"{'schedule':30}{columns}{'overlap':>9}{'engine idle':>13}{'trainer idle':>14}"
    return [heading, *(one.line(measured[0].median) for one in measured)]


def main() -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each schedule")
    parser.add_argument("--quick", action="store_true", help="one step of the last schedule: does everything work?")
    flags = parser.parse_args()
    steps, rounds, groups = (1, 1, 2) if flags.quick else (flags.steps, flags.rounds, GROUPS)
    if len(os.sched_getaffinity(0)) < 2:
        print("engine and trainer need a core each; there is one", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name, ray_session(None):
        folder = Path(name)
        make_task(folder)
        measured = measure(folder, steps, rounds, groups, list(SCHEDULES)[-1:] if flags.quick else list(SCHEDULES))
    print(f"{steps * rounds} steps of {groups} x {SAMPLES} samples, lengths lognormal with sigma {SIGMA:g}")
    print("\n".join(table(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
