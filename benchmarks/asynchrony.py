"""What an asynchronous schedule gains, with engines and a trainer of known cost: in virtual time, and live.

    python benchmarks/asynchrony.py                  # virtual time: 16 devices, every mode (two minutes)
    python benchmarks/asynchrony.py --live           # real driver, Buffer, rollout worker, Ray; the rest sleeps
    python benchmarks/asynchrony.py --quick          # seconds: does everything work?

Costs are those of ``virtual_runs.py``: a step of the trainer takes ``TRAINED`` seconds for each response token of its
rows on 16 devices. Lengths are lognormal with mean 250 tokens, cut at 3000. More devices: ``many_devices.py``.

colocated   lockstep on all devices in turn: generate on all, then train on all; nothing is paid for the change
others      the devices are split; the split of each mode is the fastest one of ``SPLITS``

Columns: seconds a step; how often as fast as colocated; share of time in which the trainer waits for groups; mean and
largest staleness. Live, ours is wall - virtual; the exit status is 1 if wall / virtual of a row is above 1.05.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from known_costs import SleepingTrainer
from schedule_bounds import response_length
from virtual_runs import (
    DECODED,
    GROUPS,
    MODES,
    PUBLISH,
    SAMPLES,
    SEED,
    SLOTS,
    Costs,
    Figures,
    best_split,
    virtual,
    write_rows,
)

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.session import ray_session
from buffer_rl.driver.launch import launch_training
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import TrainBatch
from buffer_rl.testing.fake_engine import FakeEngine
from buffer_rl.testing.tiny import make_tiny_model

HERE = Path(__file__).resolve().parent
MOST = 1.05
LIVE = ("colocated lockstep", "one-step-off", "async, S 1, M 2", "async, S 2, M 2", "async, S 2, M 4")


def virtual_table(sigmas: list[float], num_steps: int, data: Path) -> None:
    print(f"16 devices, {SLOTS} places each, P {GROUPS}, {SAMPLES} samples a prompt, {num_steps} steps")
    print(f"{'sigma':6}{'mode':20}{'engines':>8}{'s a step':>10}{'gain':>7}{'idle':>6}{'mean':>6}{'max':>5}")
    for sigma in sigmas:
        base = 0.0
        for mode in MODES:
            engines, found = best_split(mode, 16, sigma, num_steps, data)
            base = base or found.step_s
            stale = found.staleness or [0]
            line = f"{sigma:<6}{mode:20}{engines:>8}{found.step_s:>10.2f}{base / found.step_s:>7.2f}{found.idle:>6.0%}"
            print(f"{line}{sum(stale) / len(stale):>6.2f}{max(stale):>5}", flush=True)


class LiveTrainer(SleepingTrainer):
    """Sleeps for each token of its rows' responses, as long as ``--lr`` says."""

    def __init__(self, args: Any, rank: int, world_size: int, objective: Any) -> None:
        super().__init__(args, rank, world_size, objective)
        self._trained_s = float(args.lr)  # a trainer without a learning rate

    def log_probs(self, model: str, batch: TrainBatch) -> list[np.ndarray]:
        """No forward pass of its own."""
        return [np.zeros(int(length), dtype=np.float32) for length in batch.columns["response_length"]]

    def accumulate(self, batch: TrainBatch) -> Sums:
        """Forward and backward of some rows."""
        time.sleep(self._trained_s * float(np.sum(batch.columns["response_length"])))
        return Sums(divisor=float(len(batch)))

    def optimizer_step(self, scale: float) -> dict[str, float]:
        """One step."""
        return {"grad_norm": 0.0, "lr": 0.0}


@contextmanager
def live_task(folder: Path) -> Iterator[Path]:
    make_tiny_model(folder / "model")
    yield write_rows(folder)


def live(mode: str, costs: Costs, num_steps: int, folder: Path, data: Path, model: Path | None = None) -> Figures:
    """A run with a real driver, Buffer, rollout worker and Ray. model: by default the one in ``folder``."""
    schedule = MODES[mode]
    run_dir = folder / f"{mode.replace(' ', '_').replace(',', '')}_{costs.sigma}"

    def length(body: dict[str, Any]) -> int:
        return response_length(int(body["sampling_params"].get("sampling_seed", 0)), costs.sigma)

    timing: dict[str, Any] = {"latency": lambda body: DECODED * length(body), "slots": costs.slots}
    with FakeEngine(
        lambda ids, seed: [3] * response_length(seed, costs.sigma), decode=lambda ids: "", update_s=PUBLISH, **timing
    ) as engine:
        args = compose(CORE_SECTIONS).model_validate(
            {
                "run_dir": str(run_dir),
                "prompt_data": str(data),
                "hf_checkpoint": str(model or folder / "model"),
                "train_backend": f"{HERE / 'asynchrony.py'}:LiveTrainer",
                "lr": costs.trained,
                "router_url": engine.url,
                "engine_urls": [engine.url],
                "seed": SEED,
                "num_rollout": num_steps,
                "rollout_batch_size": costs.groups,
                "n_samples_per_prompt": SAMPLES,
                "rollout_max_response_len": 3000,
                "rollout_concurrency": 4096,
                "rm_type": "exact_match",
                "max_logprob_diff": None,
                "weight_sync_mode": "disk",
                "logger": [],
                "progress": "none",
                "use_tis": True,
                "schedule": schedule.mode.value,
                **({"max_staleness": schedule.max_staleness} if schedule.by_window else {}),
                **({"target_staleness": schedule.target} if schedule.by_window else {}),
            }
        )
        launch_training(args, PluginRegistry())  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "perf/step_time" in line]
    ends, now = [], 0.0
    for line in steps:
        now += line["perf/step_time"]
        ends.append(now)
    staleness = [int(line["staleness/max"]) for line in lines if "staleness/max" in line]
    return Figures(ends=ends, idle=sum(line["perf/rollout_time"] for line in steps) / now, staleness=staleness)


def live_table(sigmas: list[float], num_steps: int, modes: list[str]) -> list[str]:
    """Print the table; returns a line for each row whose wall time is too far from virtual time."""
    print(f"live: 16 devices, {SLOTS} places each, P {GROUPS}, {SAMPLES} samples a prompt, {num_steps} steps")
    print(
        f"{'sigma':6}{'mode':20}{'engines':>8}{'virtual':>9}{'wall':>8}{'wall/virtual':>14}{'ours':>7}{'gain':>7}{'max':>5}"
    )
    too_slow = []
    with tempfile.TemporaryDirectory() as name, ray_session(None), live_task(Path(name)) as data:
        for sigma in sigmas:
            base = 0.0
            for mode in modes:
                engines, _ = best_split(mode, 16, sigma, num_steps, data)
                costs = Costs.of(mode, 16, engines, sigma)
                planned = virtual(mode, costs, num_steps, data)
                found = live(mode, costs, num_steps, Path(name), data)
                ratio = found.step_s / planned.step_s
                base = base or found.step_s
                print(
                    f"{sigma:<6}{mode:20}{engines:>8}{planned.step_s:>9.2f}{found.step_s:>8.2f}{ratio:>14.3f}"
                    f"{found.step_s - planned.step_s:>7.2f}{base / found.step_s:>7.2f}{max(found.staleness or [0]):>5}",
                    flush=True,
                )
                if ratio > MOST:
                    too_slow.append(f"wall / virtual {ratio:.3f}, above {MOST:g}: {mode}, sigma {sigma:g}")
    return too_slow


def main() -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--live", action="store_true", help="real processes, sleeping engine and trainer")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(LIVE), help="of --live")
    parser.add_argument("--quick", action="store_true", help="does everything work?")
    flags = parser.parse_args()
    if flags.quick:
        flags.steps, flags.sigma, flags.modes = 5, [0.5], [LIVE[2]]
    if flags.live:
        too_slow = live_table(flags.sigma, flags.steps, flags.modes)
        print("\n".join(too_slow))
        return 1 if too_slow and not flags.quick else 0
    with tempfile.TemporaryDirectory() as name:
        virtual_table(flags.sigma, flags.steps, write_rows(Path(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
