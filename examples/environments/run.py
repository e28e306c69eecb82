"""The examples from end to end: make a game's rows and a model with random weights, train it, show what it learned.

    python examples/environments/run.py frozen_lake [any flag of `buffer-rl train` ...]
    python examples/environments/run.py text_arena  [any flag of `buffer-rl train` ...]

Every step is the command that one would type by hand. Flags go to the run. Exit status 1: a step failed, or too few of
the held-out games are won at the end.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from buffer_rl.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
METRIC = "eval/heldout/won"
WANTED = {"frozen_lake": 0.4, "text_arena": 0.4}


def run_step(command: list[str]) -> None:
    """Run one command; exit with its status if it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    if status := subprocess.run(command).returncode:
        sys.exit(status)


def verdict(won: list[tuple[int, float]], wanted: float) -> str | None:
    """None if enough was learned, otherwise what is wrong."""
    if len(won) < 2:
        return f"{len(won)} evaluations have {METRIC!r}; one before and one after training are needed"
    if won[-1][1] < wanted:
        return f"{won[-1][1]:.3f} of the held-out games are won; expected at least {wanted}"
    return None


def main() -> None:
    """Read the flags and run the steps."""
    parser = argparse.ArgumentParser(description="train a small model in an environment, from random weights")
    parser.add_argument("game", choices=WANTED)
    parser.add_argument("--run-dir", help="folder of the run's files; runs/GAME")
    flags, extra = parser.parse_known_args()
    started, run_dir = time.monotonic(), flags.run_dir or f"runs/{flags.game}"
    run_step([sys.executable, str(HERE / "prepare.py"), flags.game])
    train = [sys.executable, "-m", "buffer_rl.cli", "train", "--config", str(HERE / f"{flags.game}.yaml")]
    run_step([*train, "--run-dir", run_dir, *extra])
    won = [(record["step"], record[METRIC]) for record in read_metrics(run_dir) if METRIC in record]
    print("\nheld-out games won, by step: " + ", ".join(f"{step}: {value:.3f}" for step, value in won))
    print(f"the example took {time.monotonic() - started:.0f} s")
    if (problem := verdict(won, WANTED[flags.game])) is not None:
        sys.exit(f"{flags.game}: {problem}")


if __name__ == "__main__":
    main()
