"""The example from end to end: the quickstart's data and warm-up, a reward model fitted on the spot, and GRPO.

    python examples/reward_model/run.py [any flag of `buffer-rl train` ...]

Every step is the command that one would type by hand. Flags go to the GRPO run. Exit status 1: a step failed, or the
accuracy that the rule finds on held-out words did not rise.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from buffer_rl.observe.gains import eval_gains
from buffer_rl.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
TRAIN = [sys.executable, "-m", "buffer_rl.cli", "train", "--config"]
RUN_DIR = "runs/reward_model"


def main() -> None:
    """Run the steps; those whose results are there already are left out."""
    steps = [
        (QUICKSTART / "build" / "model", [sys.executable, str(QUICKSTART / "prepare.py")]),
        (QUICKSTART / "build" / "sft" / "hf", [*TRAIN, str(QUICKSTART / "sft.yaml")]),
        (HERE / "build" / "model", [sys.executable, str(HERE / "fit.py")]),
        (None, [*TRAIN, str(HERE / "train.yaml"), "--run-dir", RUN_DIR, *sys.argv[1:]]),
    ]
    for made, command in steps:
        if made is None or not made.exists():
            print(f"\n$ {' '.join(command)}", flush=True)
            if status := subprocess.run(command).returncode:
                sys.exit(f"reward_model: a step failed with exit status {status}")
    (gain,) = [gain for gain in eval_gains(read_metrics(RUN_DIR)) if gain.name == "heldout"]
    print(f"held-out accuracy by the rule: {gain.before:.3f} before, {gain.after:.3f} after")
    if gain.gain <= 0:
        sys.exit("reward_model: held-out accuracy did not rise")


if __name__ == "__main__":
    main()
