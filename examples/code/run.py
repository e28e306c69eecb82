"""The example from end to end: prepare, warm up, train with GRPO, show what was learned.

    python examples/code/run.py [any flag of `buffer-rl train` ...]

Every step is the command that one would type by hand. Flags go to the GRPO run. Exit status 1: a step failed, or the
share of right programs for held-out functions rose by less than 20 points.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from buffer_rl.observe.gains import EvalGain, eval_gains
from buffer_rl.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
TRAIN = [sys.executable, "-m", "buffer_rl.cli", "train", "--config"]
MIN_GAIN = 0.2


def run_step(command: list[str]) -> None:
    """Run one command; exit with its status if it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    if status := subprocess.run(command).returncode:
        sys.exit(status)


def verdict(gains: list[EvalGain]) -> str | None:
    """None if enough was learned, otherwise what is wrong."""
    found = [gain for gain in gains if gain.name == "heldout"]
    if not found:
        return "the run has no evaluation named 'heldout'"
    if found[0].gain < MIN_GAIN:
        return f"right programs went from {found[0].before:.3f} to {found[0].after:.3f}; expected {MIN_GAIN:+}"
    return None


def main() -> None:
    """Read the flags and run the steps."""
    parser = argparse.ArgumentParser(description="teach a small model to write functions")
    parser.add_argument("--run-dir", default="runs/code", help="folder of the GRPO run's files")
    flags, extra = parser.parse_known_args()
    started = time.monotonic()
    run_step([sys.executable, str(HERE / "prepare.py")])
    run_step([*TRAIN, str(HERE / "sft.yaml")])
    run_step([*TRAIN, str(HERE / "train.yaml"), "--run-dir", flags.run_dir, *extra])
    print(f"\nthe example took {time.monotonic() - started:.0f} s")
    if (problem := verdict(eval_gains(read_metrics(flags.run_dir)))) is not None:
        sys.exit(f"code: {problem}")


if __name__ == "__main__":
    main()
