"""What an asynchronous schedule gains, with engines and a trainer of known cost: in virtual time, and live.

    python benchmarks/asynchrony.py                  # virtual time: 16 devices, every mode (two minutes)
    python benchmarks/asynchrony.py --devices 64 128 # the same at 64 and 128: hours to 100, 200 and 300 steps
    python benchmarks/asynchrony.py --live           # real driver, Buffer, rollout worker, Ray; the rest sleeps
    python benchmarks/asynchrony.py --quick          # seconds: does everything work?

A device is an engine with ``SLOTS`` places, or a part of the trainer. A response holds one for ``DECODED`` seconds a
token. A step of the trainer takes ``TRAINED`` seconds for each response token of its rows on 16 devices. Lengths are
lognormal with mean 250 tokens, cut at 3000, by the seed of each sample: every mode generates the same responses.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from known_costs import SleepingTrainer
from schedule_bounds import response_length

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.session import ray_session
from buffer_rl.data.source import PromptDataSource
from buffer_rl.driver.driver import Driver
from buffer_rl.driver.launch import launch_training
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.options.section import compose
from buffer_rl.plan.schedule import Mode, RolePlan, RunPlan, Schedule
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, TrainBatch
from buffer_rl.rollout.requests import sampling_seed
from buffer_rl.testing.fake_engine import FakeEngine
from buffer_rl.testing.tiny import make_tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for tests/harness

from harness.virtual_rollouts import VirtualEngines, VirtualRollouts, VirtualSelections
from harness.virtual_time import VirtualRuntime

HERE = Path(__file__).resolve().parent
SLOTS = 8
GROUPS, SAMPLES = 16, 4
DECODED = 8e-3
TRAINED = 5e-5
PUBLISH = 0.2
SPLITS = (0.5, 0.625, 0.75)
MOST = 1.05
SEED = 1234


def asynchronous(target: int, bound: int) -> Schedule:
    return Schedule(mode=Mode.ASYNC, target=target, max_staleness=bound)


MODES: Mapping[str, Schedule] = {
    "colocated lockstep": Schedule(mode=Mode.LOCKSTEP),
    "lockstep": Schedule(mode=Mode.LOCKSTEP),
    "one-step-off": Schedule(mode=Mode.ONE_STEP_OFF, target=1, max_staleness=1, drains=True),
    "async, S 1, M 1": asynchronous(1, 1),
    "async, S 1, M 2": asynchronous(1, 2),
    "async, S 2, M 2": asynchronous(2, 2),
    "async, S 2, M 4": asynchronous(2, 4),
    "async, S 4, M 4": asynchronous(4, 4),
}
LIVE = ("colocated lockstep", "one-step-off", "async, S 1, M 2", "async, S 2, M 2", "async, S 2, M 4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """slots: responses at a time. trained: seconds of a step for each of its tokens. groups: P."""

    slots: int
    trained: float
    sigma: float
    groups: int = GROUPS

    @classmethod
    def of(cls, mode: str, devices: int, engines: int, sigma: float) -> Costs:
        """Of a mode with so many engines; P grows with the number of devices."""
        colocated = mode == "colocated lockstep"
        groups = GROUPS * devices // 16
        trainers = devices if colocated else devices - engines
        slots = SLOTS * (devices if colocated else engines)
        return cls(slots=slots, trained=TRAINED * 16 / trainers, sigma=sigma, groups=groups)


@dataclass(slots=True, kw_only=True)
class Figures:
    """Of a run: when each step ended, the share of time in which the trainer waited, and each group's staleness."""

    ends: list[float]
    idle: float
    staleness: list[int]

    @property
    def step_s(self) -> float:
        """Mean seconds a step, without the first fifth."""
        skipped = len(self.ends) // 5
        return (self.ends[-1] - self.ends[skipped]) / (len(self.ends) - 1 - skipped)


class Observer:
    """Notes when steps end, and how long each waited."""

    def __init__(self, runtime: VirtualRuntime) -> None:
        self._runtime = runtime
        self.ends: list[float] = []
        self.waited = 0.0
        self.staleness: list[int] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.ends.append(self._runtime.now())
        self.waited += metrics.get("perf/rollout_time", 0.0)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class KnownTrainer:
    """A trainer in virtual time: a step takes so long for each token of its rows."""

    def __init__(self, runtime: VirtualRuntime, state: BufferState, costs: Costs) -> None:
        self._runtime, self._state, self._costs = runtime, state, costs
        self._tokens = 0

    def fetch(self, rollout_id: int) -> None:
        rows = [row for part in self._state.plan_data(rollout_id).slices for row in part.row_ids]
        self._tokens = sum(tokens_of(row.uid, row.sample_index, self._costs.sigma) for row in rows)

    async def train(self) -> Mapping[str, float]:
        await self._runtime.loop.sleep_until(self._runtime.now() + self._costs.trained * self._tokens)
        return {}

    def discard(self) -> None:
        pass


@cache
def tokens_of(uid: GroupUid, index: int, sigma: float) -> int:
    """The length of a sample's response."""
    return response_length(sampling_seed(SEED, uid, index), sigma)


def virtual(mode: str, costs: Costs, num_steps: int, data: Path) -> Figures:
    """A run in virtual time."""
    args: Any = compose(CORE_SECTIONS)(
        prompt_data=str(data), rollout_batch_size=costs.groups, n_samples_per_prompt=SAMPLES, seed=SEED
    )
    schedule = MODES[mode]
    state = BufferState(
        PromptDataSource(args), ledger=Ledger.in_memory(), groups_per_step=costs.groups, schedule=schedule
    )
    runtime = VirtualRuntime({})
    engines = VirtualEngines(runtime=runtime, slots=costs.slots, load_s=PUBLISH)
    rollouts = VirtualRollouts(
        runtime=runtime,
        state=state,
        engines=engines,
        length=lambda uid, index: DECODED * tokens_of(uid, index, costs.sigma),
    )
    selections = VirtualSelections(runtime=runtime, state=state)
    runtime.roles |= {"buffer": state, "selection": selections, "rollout": rollouts, "publish": engines}
    runtime.roles["train"] = KnownTrainer(runtime, state, costs)
    limits = dict.fromkeys(("rollout", "train", "publish", "save", "buffer"), 1e9)
    plan = RunPlan(
        num_rollouts=num_steps,
        schedule=schedule,
        roles=RolePlan(),
        **{f"{name}_timeout_s": limit for name, limit in limits.items()},  # type: ignore[arg-type]
    )
    observer = Observer(runtime)
    Driver(plan, runtime, observer).run()  # type: ignore[arg-type]
    staleness = [value for report in selections.reports.values() for value in report.staleness]
    return Figures(ends=observer.ends, idle=observer.waited / observer.ends[-1], staleness=staleness)


def best_split(mode: str, devices: int, sigma: float, num_steps: int, data: Path) -> tuple[int, Figures]:
    """The number of engines with which the mode is fastest, and its figures."""
    if mode == "colocated lockstep":
        return devices, virtual(mode, Costs.of(mode, devices, devices, sigma), num_steps, data)
    tried = {
        engines: virtual(mode, Costs.of(mode, devices, engines, sigma), num_steps, data)
        for engines in (round(devices * split) for split in SPLITS)
    }
    engines = min(tried, key=lambda number: tried[number].step_s)
    return engines, tried[engines]


def virtual_table(devices: int, sigmas: list[float], num_steps: int, data: Path) -> None:
    groups = GROUPS * devices // 16
    print(f"{devices} devices, {SLOTS} places each, P {groups}, {SAMPLES} samples a prompt, {num_steps} steps")
    times = "".join(f"{f'{steps} steps, h':>14}" for steps in (100, 200, 300)) if devices > 16 else ""
    print(f"{'sigma':6}{'mode':20}{'engines':>8}{'s a step':>10}{'gain':>7}{'idle':>6}{'mean':>6}{'max':>5}{times}")
    for sigma in sigmas:
        base = 0.0
        for mode in MODES:
            engines, found = best_split(mode, devices, sigma, num_steps, data)
            base = base or found.step_s
            stale = found.staleness or [0]
            line = f"{sigma:<6}{mode:20}{engines:>8}{found.step_s:>10.2f}{base / found.step_s:>7.2f}{found.idle:>6.0%}"
            line += f"{sum(stale) / len(stale):>6.2f}{max(stale):>5}"
            if devices > 16:
                line += "".join(f"{steps * found.step_s / 3600:>14.2f}" for steps in (100, 200, 300))
            print(line, flush=True)


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


def write_rows(folder: Path) -> Path:
    """Prompts that are all different."""
    rows = folder / "train.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{number:06d}", "label": ""}) + "\n" for number in range(4096)))
    return rows


def live(mode: str, costs: Costs, num_steps: int, folder: Path, data: Path) -> Figures:
    """A run with a real driver, Buffer, rollout worker and Ray."""
    schedule = MODES[mode]
    run_dir = folder / f"{mode.replace(' ', '_').replace(',', '')}_{costs.sigma}"

    def length(body: dict[str, Any]) -> int:
        return response_length(int(body["sampling_params"]["sampling_seed"]), costs.sigma)

    timing: dict[str, Any] = {"latency": lambda body: DECODED * length(body), "slots": costs.slots}
    with FakeEngine(
        lambda ids, seed: [3] * response_length(seed, costs.sigma), decode=lambda ids: "", update_s=PUBLISH, **timing
    ) as engine:
        args = compose(CORE_SECTIONS).model_validate(
            {
                "run_dir": str(run_dir),
                "prompt_data": str(data),
                "hf_checkpoint": str(folder / "model"),
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
    parser.add_argument("--devices", type=int, nargs="+", default=[16])
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
        for devices in flags.devices:
            virtual_table(devices, flags.sigma, flags.steps, write_rows(Path(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
