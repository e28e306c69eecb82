"""The time of whole training steps, by phase, and the budget of a step in CPU-seconds, by process and part.

    python benchmarks/step_time.py            # about a minute
    python benchmarks/step_time.py --set schedule=pipelined stream_gradients=true
    python benchmarks/step_time.py --task long --set num_train_ranks=2 rollout_num_engines=2

Everything a real run does, on the quickstart's sizes.

32 prompts with 16 samples of at most 12 tokens a step, a Qwen3 of 0.18 million random parameters, one thread each for
the engine and the trainer. ``--task long``: the answers of 10 to 116 tokens and the trained start model of
``against_trl.py``. Every prompt is trained on (no filter), so that all steps do the same work. The first
step is left out. Shares are of the median step; generation contains scoring, and the Buffer's work, beside all of
these, contains the ledger's. What the parts of the budget are is in ``cpu_times.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import sys
import tempfile
from pathlib import Path
from typing import Any

from comparison_tasks import TASKS, Task, rows, start_model, write_rows
from cpu_times import OPTIONS, budget, budget_table, read_steps

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.driver.launch import launch_training
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.testing.tiny import make_tiny_model

PHASES = ("rollout", "train", "publish", "step", "buffer", "ledger")


def make_task(folder: Path, seed: int, task: Task | None = None) -> None:
    """A model and 2,000 prompts: of ``task``, else random weights and 3 to 10 letters."""
    if task is not None:
        start_model(folder / "model", task)
        return write_rows(folder / "train.jsonl", rows(task, 2000, "step time"))
    make_tiny_model(
        folder / "model",
        characters=string.ascii_lowercase + "=",
        seed=seed,
        hidden_size=96,
        intermediate_size=192,
        head_dim=24,
        max_position_embeddings=64,
    )
    rng = random.Random(seed)
    words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 10))) for _ in range(2000))
    lines = (json.dumps({"prompt": f"{word}=", "label": word[::-1]}) + "\n" for word in words)
    (folder / "train.jsonl").write_text("".join(lines))


def run_steps(
    folder: Path, num_steps: int, seed: int, options: dict[str, Any], max_tokens: int = 12
) -> list[dict[str, float]]:
    """Run a training with answers of at most ``max_tokens`` and return the timings of its steps, the first one left
    out; its files are in ``folder/run``."""
    args = compose(CORE_SECTIONS).model_validate(
        {
            "run_dir": str(folder / "run"),
            "prompt_data": str(folder / "train.jsonl"),
            "hf_checkpoint": str(folder / "model"),
            "num_rollout": num_steps + 1,
            "rollout_batch_size": 32,
            "n_samples_per_prompt": 16,
            "rollout_max_response_len": max_tokens,
            "rm_type": "exact_match",
            "rollout_seed": seed,
            "lr": 3e-4,
            "max_tokens_per_gpu": 2048,
            "engine_max_running_requests": 512,
            "progress": "none",
            **OPTIONS,
            **options,
        }
    )
    launch_training(args, PluginRegistry())  # type: ignore[arg-type]
    steps: dict[int, dict[str, float]] = {}
    for line in read_metrics(args.run_dir):  # type: ignore[attr-defined]
        steps.setdefault(int(line["step"]), {}).update(line)
    return [steps[step] for step in sorted(steps) if step > 0]


def table(steps: list[dict[str, float]]) -> list[str]:
    """One line a phase: median, range, share of the step."""
    whole = statistics.median(step["perf/step_time"] for step in steps)
    phases = [phase for phase in PHASES if any(f"perf/{phase}_time" in step for step in steps)]
    lines = [f"{'phase':16}{'median s':>10}{'min':>8}{'max':>8}{'share':>8}"]
    for phase in phases:
        times = [step.get(f"perf/{phase}_time", 0.0) for step in steps]
        median = statistics.median(times)
        lines.append(f"{phase:16}{median:>10.3f}{min(times):>8.3f}{max(times):>8.3f}{median / whole:>8.1%}")
    names = ("rollout/generated_tokens", "production/generated_tokens")  # of tickets, of which a step may end none
    tokens = sum(step.get(name, 0.0) for step in steps for name in names) / len(steps)
    mean = statistics.fmean(step["perf/step_time"] for step in steps)
    lines.append(f"{tokens:.0f} tokens a step, {tokens / mean:.0f} tokens/s; a step takes {mean:.3f} s on average")
    return lines


def main() -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="more options of the run")
    parser.add_argument("--task", choices=("short", "long"), default="short")
    flags = parser.parse_args()
    task = TASKS["long"] if flags.task == "long" else None
    with tempfile.TemporaryDirectory() as name:
        make_task(Path(name), flags.seed, task)
        options = dict(item.split("=", 1) for item in flags.set)
        steps = run_steps(Path(name), flags.steps, flags.seed, options, task.max_tokens if task else 12)
        used = budget(read_steps(Path(name) / "run"))
    print("\n".join([f"{len(steps)} steps of 32 x 16 samples, one thread a process", *table(steps)]))
    print("\n".join(["CPU-seconds, means over these steps", *budget_table(*used)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
