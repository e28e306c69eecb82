"""Train the recipes that need no GPU, and compare what they reach with expected.json.

    python examples/recipes/run.py [NAME ...] [--seeds 0] [--write]

A recipe is a file of options here, laid over those of examples/quickstart, whose data and model it starts from: they
are made first if they are missing. Exit status 1: a curve is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from buffer_rl.observe.curve import curves_of
from buffer_rl.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
EXPECTED = HERE / "expected.json"
NAMES = ("grpo_words", "ppo_words", "async_words")
EVAL_SET = "heldout"
MARGIN = 0.05
"""What a curve may be below the lowest of the seeds that were written, in accuracy: 400 words are answered four times,
so that the standard error of an accuracy is about 0.02."""
Curve = dict[str, float]


def command(*words: str) -> None:
    """Run ``buffer-rl`` with these words; ends this program if it fails."""
    if status := subprocess.run([sys.executable, "-m", "buffer_rl", *words]).returncode:
        sys.exit(f"recipes: buffer-rl {' '.join(words)} failed with exit status {status}")


def prepare() -> None:
    """Data and warmed-up model of the quickstart, unless they are there."""
    if not (QUICKSTART / "build" / "sft" / "hf").is_dir():
        subprocess.run([sys.executable, str(QUICKSTART / "prepare.py")], check=True)
        command("train", "--config", str(QUICKSTART / "sft.yaml"))


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train one recipe from one seed: its curve by step, seconds, and gigabytes at most, summed over processes."""
    run_dir = folder / f"{name}_{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    configs = ("--config", str(QUICKSTART / "train.yaml"), "--config", str(HERE / f"{name}.yaml"))
    seeds = ("--seed", str(seed), "--rollout-seed", str(seed))
    began = time.monotonic()
    command("train", *configs, *seeds, "--run-dir", str(run_dir))
    seconds = time.monotonic() - began
    records = read_metrics(run_dir)
    series = curves_of(records).evals[EVAL_SET]
    peaks: dict[str, float] = {}
    for record in records:
        for metric, value in record.items():
            if metric.startswith("perf/peak_memory/") and value is not None:
                peaks[metric] = max(peaks.get(metric, 0.0), value)
    curve = {str(step): round(value, 3) for step, value in zip(series.steps, series.values, strict=True)}
    return {"curve": curve, "seconds": round(seconds, 1), "memory_gb": round(sum(peaks.values()), 2)}


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What is expected, from several seeds: median and lowest curve, median seconds and memory."""
    steps = list(runs[0]["curve"])
    return {
        "curve": {step: statistics.median(found["curve"][step] for found in runs) for step in steps},
        "lowest": {step: min(found["curve"][step] for found in runs) for step in steps},
        "seconds": statistics.median(found["seconds"] for found in runs),
        "memory_gb": statistics.median(found["memory_gb"] for found in runs),
        "seeds": len(runs),
    }


def fault(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What is wrong with a curve; empty if it is as expected. Seconds and memory are those of another machine."""
    last = list(expected["lowest"])[-1]
    if last not in found["curve"]:
        return f"no evaluation after {last} steps"
    reached, least = found["curve"][last], expected["lowest"][last] - MARGIN
    return "" if reached >= least else f"{reached:.3f} after {last} steps is below {least:.3f}"


def main() -> int:
    """Run and compare; returns the exit status."""
    parser = argparse.ArgumentParser(description="run the recipes that need no GPU")
    parser.add_argument("names", nargs="*", metavar="NAME", default=NAMES, help=f"default: {' '.join(NAMES)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes"), help="where the runs write")
    parser.add_argument("--write", action="store_true", help="make what was measured the expected")
    flags = parser.parse_args()
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    prepare()
    faults, lines = [], []
    for name in flags.names:
        runs = [run(name, seed, flags.folder) for seed in flags.seeds]
        if flags.write:
            expected[name] = joined(runs)
            EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")
        of = expected[name]
        for seed, found in zip(flags.seeds, runs, strict=True):
            wrong = fault(found, of)
            faults += [f"{name}, seed {seed}: {wrong}"] if wrong else []
            curve, usual = (" ".join(f"{v:.3f}" for v in c.values()) for c in (found["curve"], of["curve"]))
            lines.append(
                f"{name:14} seed {seed}  {curve}  (expected {usual})  {found['seconds']:.0f} s ({of['seconds']:.0f})  "
                f"{found['memory_gb']:.2f} GB ({of['memory_gb']:.2f})  {'wrong' if wrong else 'as expected'}"
            )
    print("\n".join(["", *lines, *faults]))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
