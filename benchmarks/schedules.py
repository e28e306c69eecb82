"""Wall time of a step against its critical path, under each schedule, with engines and a trainer of known cost.

    python benchmarks/schedules.py            # about ten minutes

Nothing is computed: the engine answers a request after ``SECONDS_PER_DECODED_TOKEN`` times its length, and the trainer
sleeps for each token of a batch, so that what a step must take is known exactly. Everything else is what a real run
has: driver, Buffer, rollout worker, router URL, Ray. Lengths are lognormal, by the request's sampling seed: all
schedules generate the same rollouts. The first step and the last one are left out.

Columns, in seconds, medians over the steps:

T_gen      until the last response is there, by the engine's clock
streamed   the trainer's work on finished groups that may overlap with generation
bound      critical path of the step: the trainer works on one finished group after another, in the order in which
           they are finished, and what must wait for the rollout's end follows (in lockstep, all of it)
formula    max(T_gen, streamed - tail) + tail + the rest, with the streamed work on the last group as the tail: what
           ``buffer_rl.observe.timeline_stats`` gives for such a step; less than the critical path where the trainer
           waits for the first group, or groups for the trainer
ours       wall - bound; it does not depend on how long the step is

Exit status 1 if a row's median of wall/bound is above 1.05.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl.cluster.session import ray_session
from buffer_rl.config import compose
from buffer_rl.driver.launch import launch_training
from buffer_rl.observe.timeline import read_trace
from buffer_rl.observe.timeline_stats import step_windows
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.plugins import PluginRegistry
from buffer_rl.testing.fake_engine import FakeEngine
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.types import TrainBatch

GROUPS, SAMPLES = 16, 4
MEAN_LENGTH, MAX_LENGTH = 250, 3000
SECONDS_PER_DECODED_TOKEN = 2.5e-3
SECONDS_PER_FORWARD_TOKEN = 60e-6
SECONDS_PER_TRAINED_TOKEN = 180e-6  # forward and backward
OPTIMIZER_S, PUBLISH_S = 0.2, 0.4
MOST_OF_BOUND = 1.05
SIGMAS = (0.5, 1.0, 1.5)
SCHEDULES = {
    "lockstep": {"schedule": "lockstep"},
    "pipelined": {"schedule": "pipelined"},
    "streamed gradients": {"schedule": "pipelined", "stream_gradients": True},
}


class SleepingTrainer:
    """A trainer that computes nothing, in known time. See ``buffer_rl.contracts.Trainer``."""

    def __init__(self, args: Any, rank: int, world_size: int) -> None:
        pass

    def log_probs(self, role: str, batch: TrainBatch) -> list[np.ndarray]:
        """One forward pass."""
        time.sleep(SECONDS_PER_FORWARD_TOKEN * sum(batch.lengths))
        return [np.zeros(int(length), dtype=np.float32) for length in batch.columns["response_length"]]

    def compute_advantages(self, batch: TrainBatch) -> None:
        """Not needed."""

    def forward_backward(self, batch: TrainBatch) -> dict[str, float]:
        """Forward and backward of all rows."""
        self.accumulate(batch)
        return {}

    def accumulate(self, batch: TrainBatch) -> None:
        """Forward and backward of some rows."""
        time.sleep(SECONDS_PER_TRAINED_TOKEN * sum(batch.lengths))

    def finish_accumulation(self, total_rows: int, total_tokens: int) -> dict[str, float]:
        """Nothing is left to do."""
        return {}

    def zero_grad(self) -> None:
        """There are no sums to forget."""

    def optimizer_step(self) -> dict[str, float]:
        """One step."""
        time.sleep(OPTIMIZER_S)
        return {"grad_norm": 0.0, "lr": 0.0}

    def export_buckets(self) -> Iterator[dict[str, Any]]:
        """No weights."""
        yield from ()

    def save_hf(self, path: str) -> None:
        """An empty folder."""
        Path(path).mkdir(parents=True, exist_ok=True)

    def save(self, path: str) -> None:
        """Not needed."""

    def load(self, path: str) -> None:
        """Not needed."""

    def sleep(self) -> None:
        """Not needed."""

    def wake_up(self) -> None:
        """Not needed."""


def response_length(seed: int, sigma: float) -> int:
    """Lognormal with mean ``MEAN_LENGTH``, whatever sigma, cut at ``MAX_LENGTH``."""
    normal = random.Random(seed).gauss(0.0, 1.0)
    length = MEAN_LENGTH * math.exp(sigma * normal - sigma**2 / 2)
    return min(max(1, round(length)), MAX_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGroup:
    """When the engine finishes a group, in seconds since its rollout's start, and how many tokens its rows have."""

    finished: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a step must take; see the columns above."""

    generation: float
    streamed: float
    path: float
    formula: float


def known_groups(requests: Sequence[dict[str, Any]], sigma: float) -> dict[int, list[KnownGroup]]:
    """The groups of each rollout, from what the engine was asked."""
    responses: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for body in requests:
        task, prompt = str(body["rid"]).partition(":")[0], tuple(body["input_ids"])
        length = response_length(int(body["sampling_params"]["sampling_seed"]), sigma)
        responses.setdefault(int(task.removeprefix("train_")), {}).setdefault(prompt, []).append(length)
    return {
        rollout_id: [
            KnownGroup(finished=max(lengths) * SECONDS_PER_DECODED_TOKEN, tokens=sum(len(prompt) + n for n in lengths))
            for prompt, lengths in groups.items()
        ]
        for rollout_id, groups in responses.items()
    }


def bounds(schedule: str, groups: Sequence[KnownGroup]) -> Bounds:
    """The critical path of one step, and the formula's value."""
    generation = max(group.finished for group in groups)
    tokens = sum(group.tokens for group in groups)
    update = OPTIMIZER_S + (0.0 if schedule == "streamed gradients" else SECONDS_PER_TRAINED_TOKEN * tokens)
    rest = update + PUBLISH_S
    if schedule == "streamed gradients":  # one pass gives the old log-probabilities and the loss
        rate = SECONDS_PER_FORWARD_TOKEN + SECONDS_PER_TRAINED_TOKEN
    else:
        rate = 2 * SECONDS_PER_FORWARD_TOKEN
    streamed = rate * tokens
    if schedule == "lockstep":
        whole = generation + streamed + rest
        return Bounds(generation=generation, streamed=streamed, path=whole, formula=whole)
    free = 0.0
    in_order = sorted(groups, key=lambda group: group.finished)
    for group in in_order:
        free = max(free, group.finished) + rate * group.tokens
    tail = rate * in_order[-1].tokens
    formula = max(generation, streamed - tail) + tail + rest
    return Bounds(generation=generation, streamed=streamed, path=free + rest, formula=formula)


def make_task(folder: Path) -> None:
    """A tokenizer, and prompts that are all different and equally long."""
    make_tiny_model(folder / "model")
    rows = (json.dumps({"prompt": f"{number:06d}", "label": ""}) + "\n" for number in range(4096))
    (folder / "train.jsonl").write_text("".join(rows))


def run_schedule(folder: Path, name: str, sigma: float, num_steps: int) -> list[tuple[float, Bounds]]:
    """Wall time and bounds of each measured step."""
    run_dir = folder / f"{name.replace(' ', '_')}_{sigma}"

    def latency(body: dict[str, Any]) -> float:
        return SECONDS_PER_DECODED_TOKEN * response_length(int(body["sampling_params"]["sampling_seed"]), sigma)

    def respond(input_ids: list[int], seed: int) -> list[int]:
        return [3] * response_length(seed, sigma)

    with FakeEngine(respond, latency=latency, decode=lambda ids: "", update_s=PUBLISH_S) as engine:
        args = compose(CORE_SECTIONS).model_validate(
            {
                "run_dir": str(run_dir),
                "prompt_data": str(folder / "train.jsonl"),
                "hf_checkpoint": str(folder / "model"),
                "train_backend": f"{Path(__file__).resolve()}:SleepingTrainer",
                "router_url": engine.url,
                "engine_urls": [engine.url],
                "num_rollout": num_steps + 2,
                "rollout_batch_size": GROUPS,
                "n_samples_per_prompt": SAMPLES,
                "rollout_max_response_len": MAX_LENGTH,
                "rm_type": "exact_match",
                "use_kl_loss": True,
                "kl_loss_coef": 0.01,
                "weight_sync_mode": "disk",
                "logger": [],
                "progress": "none",
                **SCHEDULES[name],
            }
        )
        launch_training(args, PluginRegistry())  # type: ignore[arg-type]
        groups = known_groups(engine.log.requests, sigma)
    windows = step_windows(read_trace(run_dir))
    measured = range(1, num_steps + 1)
    return [(windows[step][1] - windows[step][0], bounds(name, groups[step])) for step in measured]


def of_bound(steps: Sequence[tuple[float, Bounds]]) -> float:
    """The median of wall/bound."""
    return statistics.median(wall / bound.path for wall, bound in steps)


def table_line(sigma: float, name: str, steps: Sequence[tuple[float, Bounds]]) -> str:
    """Medians; the ratios are medians of ratios, the last column is the greatest."""

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    times = [
        median(bound.generation for _, bound in steps),
        median(bound.streamed for _, bound in steps),
        median(bound.formula for _, bound in steps),
        median(bound.path for _, bound in steps),
        median(wall for wall, _ in steps),
        median(wall - bound.path for wall, bound in steps),
    ]
    worst = max(wall / bound.path for wall, bound in steps)
    numbers = "".join(f"{seconds:>10.3f}" for seconds in times)
    of_formula = median(wall / bound.formula for wall, bound in steps)
    return f"{sigma:<6}{name:20}{numbers}{of_formula:>14.3f}{of_bound(steps):>12.3f}{worst:>8.3f}"


def main() -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each run")
    parser.add_argument("--sigma", type=float, nargs="+", default=SIGMAS)
    parser.add_argument("--schedule", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--keep", type=Path, help="put the runs into this folder and keep them")
    flags = parser.parse_args()
    columns = ("T_gen", "streamed", "formula", "bound", "wall", "ours")
    heading = "".join(f"{column:>10}" for column in columns)
    print(f"{GROUPS} groups of {SAMPLES}, mean length {MEAN_LENGTH}, {flags.steps} steps each")
    print(f"{'sigma':6}{'schedule':20}{heading}{'wall/formula':>14}{'wall/bound':>12}{'worst':>8}", flush=True)
    ratios = {}
    with tempfile.TemporaryDirectory() as name, ray_session(None):
        folder = flags.keep or Path(name)
        make_task(folder)
        for sigma in flags.sigma:
            for schedule in flags.schedule:
                steps = run_schedule(folder, schedule, sigma, flags.steps)
                print(table_line(sigma, schedule, steps), flush=True)
                ratios[f"{schedule} at sigma {sigma:g}"] = of_bound(steps)
    return verdict(ratios)


def verdict(ratios: Mapping[str, float]) -> int:
    """Say which rows are too slow, by their medians of wall/bound. Returns the exit status."""
    slow = {row: ratio for row, ratio in ratios.items() if not ratio <= MOST_OF_BOUND}
    for row, ratio in slow.items():
        print(f"wall/bound {ratio:.3f}, above {MOST_OF_BOUND:g}: {row}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
