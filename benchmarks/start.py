"""Seconds from the command to the first request of a sample, to the end of the first training step, and to the end.

    python benchmarks/start.py                                   # five runs, in turns with TRL's (extra bench)
    python benchmarks/start.py --also before=OTHER/bin/python    # and with another version's interpreter
    python benchmarks/start.py --trl-python none                 # without TRL

One step of GRPO on 8 prompts with 4 samples each, with a model of some thousand parameters. The first request of
buffer_rl is noted by a generate function, that of TRL by the callback that its trainer calls before it generates.
Prints medians and ranges; each system runs once before, uncounted, so that files are in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from buffer_rl.testing.tiny import make_tiny_model

PARTS = ("first request", "first step", "end")
PROMPTS, SAMPLES, MAX_TOKENS = 8, 4, 6
LIMIT_S = 300.0
PROBE = """
import pathlib, time
from buffer_rl.rollout.generate import generate as own

async def generate(args, sample, sampling_params):
    noted = pathlib.Path(args.run_dir, "first_request")
    if not noted.exists():
        noted.write_text(str(time.time()))
    return await own(args, sample, sampling_params)

def reward(args, sample):
    return float(sample.response.count("a"))
"""
TRL = """
import json, sys, time
from pathlib import Path
import trl
from datasets import Dataset
from transformers import TrainerCallback

folder, prompts, samples, tokens = Path(sys.argv[1]), *map(int, sys.argv[2:])

class Clock(TrainerCallback):
    def on_step_begin(self, *_, **__):
        Path("first_request").write_text(str(time.time()))
    def on_step_end(self, *_, **__):
        Path("first_step").write_text(str(time.time()))

config = trl.GRPOConfig(
    output_dir="out", max_steps=1, per_device_train_batch_size=prompts * samples, num_generations=samples,
    max_completion_length=tokens, learning_rate=1e-2, use_cpu=True, bf16=False, gradient_checkpointing=False,
    logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
)
rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
trl.GRPOTrainer(
    model=str(folder / "model"), args=config, train_dataset=Dataset.from_list(rows), callbacks=[Clock()],
    reward_funcs=lambda completions, **_: [float(text.count("a")) for text in completions],
).train()
"""


def ours(folder: Path) -> list[str]:
    """The arguments of one run, in its own folder."""
    options = {
        "run-dir": "run",
        "prompt-data": str(folder / "train.jsonl"),
        "hf-checkpoint": str(folder / "model"),
        "num-rollout": "1",
        "rollout-batch-size": str(PROMPTS),
        "n-samples-per-prompt": str(SAMPLES),
        "rollout-max-response-len": str(MAX_TOKENS),
        "custom-generate-function-path": f"{folder / 'probe.py'}:generate",
        "custom-rm-path": f"{folder / 'probe.py'}:reward",
        "lr": "1e-2",
        "progress": "plain",
    }
    return ["-m", "buffer_rl.cli", "train", *(f"--{name}={value}" for name, value in options.items())]


def seconds_of(command: list[str], folder: Path) -> dict[str, float]:
    """Run ``command`` in ``folder``; seconds of each part since it was started. Raises SystemExit if it
    fails."""
    folder.mkdir()
    started, times = time.time(), {}
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/"):
                times["first step"] = time.time() - started
    times["end"] = time.time() - started
    if process.returncode:
        raise SystemExit(f"{command} ended with status {process.returncode}:\n{(folder / 'errors').read_text()}")
    for part in PARTS[:2]:
        for noted in folder.rglob(part.replace(" ", "_")):
            times[part] = float(noted.read_text()) - started
    return {part: times[part] for part in PARTS}


def main() -> None:
    """Measure in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each system (default: 5)")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PYTHON", help="another buffer_rl")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL; none: without it")
    flags = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles what it installs, a first run what is in a checkout
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tiny_model(folder / "model", characters="abc=", hidden_size=32, intermediate_size=48)
        rows = [
            {"prompt": f"{word}=", "label": word[::-1]} for word in ("ab", "ba", "abc", "bca", "cab", "acb", "bb", "cc")
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "probe.py").write_text(PROBE)
        (folder / "of_trl.py").write_text(TRL)
        systems = {"buffer_rl": [sys.executable, *ours(folder)]}
        systems |= {name: [python, *ours(folder)] for name, _, python in (each.partition("=") for each in flags.also)}
        if flags.trl_python != "none":
            counts = map(str, (PROMPTS, SAMPLES, MAX_TOKENS))
            systems["TRL"] = [flags.trl_python, str(folder / "of_trl.py"), str(folder), *counts]
        found: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
        for run in range(flags.runs + 1):
            for name, command in systems.items():
                seconds = seconds_of(command, folder / f"{name}_{run}")
                print(run, name, {part: round(value, 2) for part, value in seconds.items()}, flush=True)
                found[name] += [seconds] if run else []
    print(f"\n{'seconds to':<12}", *(f"{part:>22}" for part in PARTS))
    for name, runs in found.items():
        values = [[run[part] for run in runs] for part in PARTS]
        cells = [f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in values]
        print(f"{name:<12}", *(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
