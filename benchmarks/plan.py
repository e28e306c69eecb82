"""How near ``buffer-rl plan`` comes: one configuration is recorded, others are predicted from it, and then run.

    python benchmarks/plan.py                # six runs, three times: ten minutes on a quiet machine
    python benchmarks/plan.py --held-out     # seven other runs, three times
    python benchmarks/plan.py --known        # five runs whose engine and trainer sleep: eight minutes
    python benchmarks/plan.py --quick        # two runs of few steps: does everything work?

The quickstart's warmed-up model and task (``make quickstart`` makes both), at a learning rate that changes nothing, so
that all runs generate answers of the same lengths; each process has one thread. The first configuration of ``RUNS`` is
recorded; the costs that are fitted from it predict the others. Each round records again.

Other work on the machine takes cores. What it had between the first step and the last of each run is read from
``/proc``. A prediction is for a machine on which so many other processes are always busy as then have as much; the
cores that other work had stand in the table.

With ``--known`` the costs are those of ``asynchrony.py --live``: 16 devices, whose engine and trainer sleep for each
token, so that other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpu_times import TICK_S, run_processes

from buffer_rl.observe.costs import Recorded, Shape, fitted
from buffer_rl.verbs.plan.forecast import Setup, calibrated, forecast, write_prompts
from buffer_rl.verbs.plan.verb import options_of, parse_schedule, setup_of

HERE = Path(__file__).resolve()
QUICKSTART = HERE.parents[1] / "examples" / "quickstart"
FILE = "load.jsonl"
NEAR = 0.15
MATCHED = 3
"""Rounds in which the number of other processes is found."""
ASYNC = ("--loss-type", "decoupled_ppo")
FLAGS: Mapping[str, tuple[str, ...]] = {
    "lockstep": ("--schedule", "lockstep"),
    "pipelined": ("--schedule", "pipelined"),
    "stream-gradients": ("--schedule", "pipelined", "--stream-gradients"),
    "one-step-off": ("--schedule", "one-step-off", *ASYNC),
    "async:1:2": ("--schedule", "async", "--max-staleness", "2", *ASYNC),
}
RUNS = (
    ("lockstep", 1, 1),
    ("lockstep", 2, 2),
    ("stream-gradients", 1, 1),
    ("one-step-off", 1, 2),
    ("async:1:2", 1, 1),
    ("async:1:2", 2, 1),
)
"""Schedule, engines, ranks."""
HELD_OUT = (
    RUNS[0],
    ("pipelined", 2, 1),
    ("lockstep", 2, 1),
    ("lockstep", 1, 2),
    ("stream-gradients", 2, 1),
    ("one-step-off", 2, 1),
    ("async:1:2", 2, 2),
)
"""Runs that nobody looked at while the model of the costs was written, but for the first one."""

KNOWN = (
    ("lockstep", 8),
    ("lockstep", 12),
    ("one-step-off", 8),
    ("async, S 1, M 2", 10),
    ("async, S 2, M 4", 12),
)
"""Modes of ``asynchrony.py``, and how many of 16 devices have engines."""
DEVICES, SIGMA = 16, 0.5


class LoadLogger:
    """A logger of ``--logger``: appends to ``RUN_DIR/load.jsonl`` one line a step: ``time`` (monotonic), CPU-seconds of
    the whole machine and of this run so far."""

    def __init__(self, args: Any, run_dir: str) -> None:
        self._file = (Path(run_dir) / FILE).open("w", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Read at the end of a step."""
        if "perf/step_time" in metrics:
            own = sum(seconds for _, _, seconds in run_processes(os.getpid()))
            line = {"time": time.monotonic(), "machine": machine_seconds(), "own": own}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def machine_seconds() -> float:
    """CPU-seconds that all processes of the machine have used: user, nice, system."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return sum(float(field) for field in fields[1:4]) * TICK_S


def others_busy(run_dir: Path) -> float:
    """The cores that other work had, on average between a run's first step and its last."""
    lines = [json.loads(line) for line in (run_dir / FILE).read_text().splitlines()]
    first, last = lines[0], lines[-1]
    others = (last["machine"] - first["machine"]) - (last["own"] - first["own"])
    return max(0.0, float(others / (last["time"] - first["time"])))


def train(run_dir: Path, run: tuple[str, int, int], num_steps: int) -> None:
    """One run, by the command line. Raises SystemExit if it fails."""
    schedule, engines, ranks = run
    command = [
        str(Path(sysconfig.get_path("scripts")) / "buffer-rl"),
        "train",
        *("--config", str(QUICKSTART / "train.yaml"), "--run-dir", str(run_dir)),
        *("--rollout-num-engines", str(engines), "--num-train-ranks", str(ranks), "--num-rollout", str(num_steps)),
        *("--lr", "1e-9", "--eval-interval", "100000", "--skip-eval-before-train", "--progress", "none"),
        *("--logger", f"{HERE}:LoadLogger", *FLAGS[schedule]),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Seconds a step, predicted and measured. others: cores that other work had."""

    run: tuple[str, int, int]
    predicted: float
    measured: float
    others: float

    @property
    def ratio(self) -> float:
        """Of predicted to measured."""
        return self.predicted / self.measured


def compare(folder: Path, runs: Sequence[tuple[str, int, int]], num_steps: int, simulated: int) -> list[Compared]:
    """Run every configuration that has not run, and predict each from the first one."""
    found: list[Compared] = []
    base: Recorded | None = None
    prompts = write_prompts(folder)
    for number, run in enumerate(runs):
        run_dir = folder / f"run_{number}"
        if not (run_dir / "report.html").exists():
            train(run_dir, run, num_steps)
        setup, _ = setup_of(options_of(run_dir), run_dir, len(os.sched_getaffinity(0)))
        name, engines, ranks = run
        assert parse_schedule(name) == (setup.schedule, setup.streams_gradients)
        recorded = fitted(run_dir, Shape(groups=setup.groups, samples=setup.samples, engines=engines, ranks=ranks))
        others = others_busy(run_dir)
        setup = replace(setup, others=others)
        for _ in range(MATCHED):
            if base is None or number == 0:
                base = replace(recorded, costs=calibrated(recorded, setup, simulated, prompts))
            predicted = forecast(base, base.costs, setup, simulated, prompts)
            if predicted.others_busy > 0:
                setup = replace(setup, others=setup.others * others / predicted.others_busy)
        one = Compared(run=run, predicted=predicted.step_s, measured=recorded.step_s, others=others)
        found.append(one)
        print(
            f"{run}: predicted {one.predicted:.3f}, measured {one.measured:.3f}; others had {others:.2f} cores, "
            f"as {setup.others:.2f} processes",
            flush=True,
        )
    return found


def compare_known(num_steps: int, simulated: int) -> None:
    """Record the first run of ``KNOWN``, and print what is predicted of each and what it took."""
    from asynchrony import MODES, SLOTS, live, live_task
    from virtual_runs import Costs

    from buffer_rl.cluster.session import ray_session

    base: Recorded | None = None
    print("| mode | engines' devices | predicted s | measured s | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, ray_session(None), live_task(Path(name)) as data:
        prompts = write_prompts(Path(name))
        for mode, engines in KNOWN:
            costs = Costs.of(mode, DEVICES, engines, SIGMA)
            folder = Path(name) / f"{mode} {engines}".replace(" ", "_").replace(",", "")
            folder.mkdir()
            live(mode, costs, num_steps, folder, data, Path(name) / "model")
            (run_dir,) = (path.parent for path in folder.rglob("trace.json"))
            shape = Shape(groups=costs.groups, samples=costs.samples, engines=1, ranks=DEVICES - engines)
            recorded = fitted(run_dir, shape)
            setup = Setup(
                schedule=MODES[mode],
                engines=1,
                ranks=DEVICES - engines,
                groups=costs.groups,
                samples=costs.samples,
                slots=SLOTS * engines,
            )
            if base is None:
                base = replace(recorded, costs=calibrated(recorded, setup, simulated, prompts))
            predicted = forecast(base, base.costs, setup, simulated, prompts).step_s
            ratio = predicted / recorded.step_s
            print(f"| {mode} | {engines} | {predicted:.2f} | {recorded.step_s:.2f} | {ratio:.2f} |", flush=True)


def table(rounds: Sequence[Sequence[Compared]]) -> list[str]:
    """Markdown: a line a configuration, medians over rounds."""
    lines = [
        "| schedule | engines | ranks | predicted s | measured s | ratio | ratios | others' cores |",
        "|---" * 8 + "|",
    ]
    for members in zip(*rounds, strict=True):
        name, engines, ranks = members[0].run
        ratios = sorted(one.ratio for one in members)
        predicted, measured, others = (
            statistics.median(values)
            for values in zip(*((one.predicted, one.measured, one.others) for one in members), strict=True)
        )
        spread = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(
            f"| {name} | {engines} | {ranks} | {predicted:.3f} | {measured:.3f} | {statistics.median(ratios):.2f} | "
            f"{spread} | {others:.2f} |"
        )
    return lines


def main() -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--simulated", type=int, default=10, help="steps of each prediction")
    parser.add_argument(
        "--output", type=Path, help="folder of the runs; those in it are not run again (default: a temporary one)"
    )
    parser.add_argument("--quick", action="store_true", help="two runs of few steps: does everything work?")
    parser.add_argument("--held-out", action="store_true", help="runs that the model of the costs was not written with")
    parser.add_argument("--known", action="store_true", help="runs whose engine and trainer sleep")
    flags = parser.parse_args()
    if flags.known:
        compare_known(flags.steps, flags.simulated)
        return 0
    if not (QUICKSTART / "build" / "sft" / "hf").is_dir():
        print("the quickstart's model is not there: make quickstart", file=sys.stderr)
        return 1
    runs = HELD_OUT if flags.held_out else RUNS
    runs = (runs[0], runs[4]) if flags.quick else runs
    if flags.quick:
        flags.rounds, flags.steps, flags.simulated = 1, 6, 6
    print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = flags.output or Path(name)
        rounds = []
        for number in range(flags.rounds):
            (folder / f"round_{number}").mkdir(parents=True, exist_ok=True)
            rounds.append(compare(folder / f"round_{number}", runs, flags.steps, flags.simulated))
    print("\n".join(table(rounds)))
    others = [members[0].run for members in zip(*rounds, strict=True)][1:]
    near = [abs(statistics.median(one.ratio for one in members) - 1) <= NEAR for members in zip(*rounds, strict=True)]
    print(f"\nwithin {NEAR:.0%} of what was measured: {sum(near[1:])} of {len(others)} that were predicted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
