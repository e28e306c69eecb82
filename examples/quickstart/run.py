"""The quickstart from end to end: prepare, warm up, train with GRPO, show what was learned.

    python examples/quickstart/run.py [--seed N] [--run-dir FOLDER] [any flag of `buffer-rl train` ...]

Every step is the command that one would type by hand; it is printed before it runs. Flags that this script does
not know go to the GRPO run. Exit status 1: a step failed, or the model did not get better.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from buffer_rl.observe.gains import EvalGain, eval_gains
from buffer_rl.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
MIN_GAIN = 0.25
EVAL_SET = "heldout"


def run_step(title: str, command: list[str]) -> None:
    """Run one command; exit with its status if it fails."""
    started = time.monotonic()
    print(f"\n== {title}\n$ {shlex.join(command)}", flush=True)
    status = subprocess.run(command).returncode
    if status != 0:
        sys.exit(f"quickstart: '{title}' failed with exit status {status}")
    print(f"== {title}: {time.monotonic() - started:.0f} s", flush=True)


def console_script(name: str) -> str:
    """The path of a command that this Python environment installed."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.is_file():
        sys.exit(f"quickstart: {path} is missing; install the project first: make quickstart")
    return str(path)


def verdict(gains: list[EvalGain]) -> str | None:
    """None if accuracy on the held-out words rose by at least ``MIN_GAIN``, otherwise what is wrong."""
    found = [gain for gain in gains if gain.name == EVAL_SET]
    if not found:
        return f"the run has no evaluation named {EVAL_SET!r}"
    gain = found[0]
    if gain.gain < MIN_GAIN:
        change = f"{100 * gain.gain:+.1f} points ({gain.before:.3f} to {gain.after:.3f})"
        return f"nothing was learned: held-out accuracy changed by {change}; expected at least {100 * MIN_GAIN:+.0f}"
    return None


def main() -> None:
    """Read the flags and run the steps."""
    parser = argparse.ArgumentParser(description="train a small model to spell words backwards")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data, the model and both trainings")
    parser.add_argument("--run-dir", default="runs/quickstart", help="folder of the GRPO run's files")
    flags, extra = parser.parse_known_args()
    seed = str(flags.seed)
    train = [console_script("buffer-rl"), "train", "--seed", seed, "--rollout-seed", seed]

    started = time.monotonic()
    run_step("prepare data and model", [sys.executable, str(HERE / "prepare.py"), "--seed", seed])
    run_step("warm up (supervised)", [*train, "--config", str(HERE / "sft.yaml")])
    run_step("train (GRPO)", [*train, "--config", str(HERE / "train.yaml"), "--run-dir", flags.run_dir, *extra])
    print(f"\nquickstart took {time.monotonic() - started:.0f} s")
    problem = verdict(eval_gains(read_metrics(flags.run_dir)))  # the run itself has printed its report
    if problem is not None:
        sys.exit(f"quickstart: {problem}")


if __name__ == "__main__":
    main()
