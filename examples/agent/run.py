"""The example from end to end: make the game's rounds and a model with random weights, train it, show what it learned.

    python examples/agent/run.py [any flag of `buffer-rl train` ...]

Every step is the command that one would type by hand. Flags go to the run. Exit status 1: a step failed, or fewer than
40% of the games of held-out ranges are won at the end.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from buffer_rl.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
METRIC = "eval/heldout/won"
WANTED = 0.4


def run_step(command: list[str]) -> None:
    """Run one command; exit with its status if it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    if status := subprocess.run(command).returncode:
        sys.exit(status)


def curve(records: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Step, and share of held-out games won, of each evaluation."""
    return [(record["step"], record[METRIC]) for record in records if METRIC in record]


def verdict(won: list[tuple[int, float]]) -> str | None:
    """None if enough was learned, otherwise what is wrong."""
    if len(won) < 2:
        return f"{len(won)} evaluations have {METRIC!r}; one before and one after training are needed"
    if won[-1][1] < WANTED:
        return f"{won[-1][1]:.3f} of the held-out games are won; expected at least {WANTED}"
    return None


def main() -> None:
    """Read the flags and run the steps."""
    parser = argparse.ArgumentParser(description="train an agent that guesses numbers, from random weights")
    parser.add_argument("--run-dir", default="runs/agent", help="folder of the run's files")
    flags, extra = parser.parse_known_args()
    started = time.monotonic()
    run_step([sys.executable, str(HERE / "prepare.py")])
    train = [sys.executable, "-m", "buffer_rl.cli", "train", "--config", str(HERE / "train.yaml")]
    run_step([*train, "--run-dir", flags.run_dir, *extra])
    won = curve(read_metrics(flags.run_dir))
    print("\nheld-out games won, by step: " + ", ".join(f"{step}: {value:.3f}" for step, value in won))
    print(f"the example took {time.monotonic() - started:.0f} s")
    if (problem := verdict(won)) is not None:
        sys.exit(f"agent: {problem}")


if __name__ == "__main__":
    main()
