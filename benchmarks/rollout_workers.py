"""How many calls of a generate function and of a reward, both of Python alone, several rollout workers make a second.

    python benchmarks/rollout_workers.py            # 1, 2 and 4 workers, three runs each in turns
    python benchmarks/rollout_workers.py --quick    # does it work?

Each call computes for a fixed time on the CPU, as a parser or a checker does. Whole runs without a trainer, in
lockstep: all workers share each ticket. Medians over the steps after the first one, and the range over the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FUNCTIONS = """
import time


def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def generate(args, sample, sampling_params):
    compute(args.call_ms / 1000)
    sample.tokens, sample.response, sample.response_length = [3, 4], "a", 1
    sample.rollout_log_probs, sample.status = [-0.5], "completed"
    return sample


async def reward(args, sample):
    compute(args.call_ms / 1000)
    return 1.0
"""
GROUPS, SAMPLES = 32, 8


def calls_per_s(folder: Path, workers: int, number: int, steps: int, call_ms: float) -> float:
    """Generate calls a second of one run, as many as calls of the reward: the median over its steps but the first."""
    run_dir = folder / f"run_{workers}_{number}"
    flags = {
        "prompt-data": "rows.jsonl",
        "hf-checkpoint": "model",
        "custom-generate-function-path": "functions.py:generate",
        "custom-rm-path": "functions.py:reward",
        "custom-config-path": json.dumps({"call_ms": call_ms}),
        "num-rollout": str(steps),
        "rollout-batch-size": str(GROUPS),
        "n-samples-per-prompt": str(SAMPLES),
        "num-rollout-workers": str(workers),
        "rollout-max-response-len": "8",
        "engine-context-length": "64",
        "run-dir": str(run_dir),
        "progress": "plain",
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    command = [sys.executable, "-m", "buffer_rl", "train", "--debug-rollout-only", "--no-trial", *words]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if answer.returncode:
        raise RuntimeError(answer.stdout[-2000:] + answer.stderr[-2000:])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["perf/rollout_time"] for line in lines if "perf/rollout_time" in line]
    return GROUPS * SAMPLES / statistics.median(seconds[1:])


def main() -> int:
    """Print one line for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--call-ms", type=float, default=2.0, help="CPU time of each call")
    parser.add_argument("--quick", action="store_true", help="the shortest form: does it work?")
    args = parser.parse_args()
    if args.quick:
        args.workers, args.runs, args.steps = [2], 1, 2
    from buffer_rl.testing.tiny import make_tiny_model

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model")
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": "abc"}) + "\n" for _ in range(64)))
        found: dict[int, list[float]] = {workers: [] for workers in args.workers}
        for number in range(args.runs):  # in turns, so that what else the machine does meets all of them
            for workers in args.workers:
                found[workers].append(calls_per_s(folder, workers, number, args.steps, args.call_ms))
    print(f"calls of {args.call_ms:g} ms on {os.cpu_count()} cores; generate calls a second, and rewards")
    base = statistics.median(found[args.workers[0]])
    for workers, rates in found.items():
        rate = statistics.median(rates)
        print(f"{workers} workers  {rate:7.0f}  ({min(rates):.0f} to {max(rates):.0f})  {rate / base:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
