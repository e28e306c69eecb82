"""One run of buffer_rl for ``against_trl.py``: ``python comparison_ours.py SPEC.json``; what is equal for both systems
is in ``comparison_settings``.

The weights that are evaluated are those of the run's checkpoints, whose writing is taken off the times.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

RESULT = "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One run. folder: of its files. start: the model. rows: the data file. threads, micro_batch: of TRL. options: of
    buffer_rl, beside the common ones. cores: the processors that all processes of the run share."""

    folder: Path
    start: Path
    rows: Path
    max_tokens: int
    steps: int
    eval_every: int
    seed: int
    cores: int
    threads: int = 1
    micro_batch: int = 512
    options: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Spec:
        """From a file that ``write`` wrote; keeps this process, and all that it starts, to ``cores`` processors."""
        values = json.loads(path.read_text(encoding="utf-8"))
        spec = cls(**{**values, **{name: Path(values[name]) for name in ("folder", "start", "rows")}})
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: spec.cores])
        return spec

    def write(self) -> Path:
        """Into the folder; returns the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "spec.json"
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")
        return path

    def weights(self, step: int) -> Path:
        """The folder of the weights after ``step`` steps."""
        return self.folder / "save" / f"step_{step:06d}" / "hf"

    def write_result(
        self,
        *,
        version: str,
        start_s: float,
        seconds: Sequence[float],
        cpu: Mapping[str, Sequence[float]],
        **more: Sequence[float],
    ) -> None:
        """start_s: seconds before the first step. seconds: of each step. cpu: CPU-seconds of each step by process.
        more: other figures of the steps."""
        found = {"version": version, "start_s": start_s, "seconds": list(seconds), "cpu": dict(cpu), **more}
        (self.folder / RESULT).write_text(json.dumps(found), encoding="utf-8")


def seconds_of_process() -> float:
    """Since this process was started, imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def step_seconds(perf: Sequence[Mapping[str, float]], ends: Sequence[float], *, waits_for_saves: bool) -> list[float]:
    """Seconds of each step, from the end of the one before.

    perf: the metrics of each step. ends: when it ended. The first step began when the run had started. waits_for_saves:
    nothing goes on while a checkpoint is written, so its time is taken off; else it counts."""
    whole = [perf[0]["perf/step_time"], *(after - before for before, after in pairwise(ends))]
    saves = [step.get("perf/save_time", 0.0) if waits_for_saves else 0.0 for step in perf]
    return [seconds - save for seconds, save in zip(whole, saves, strict=True)]


def cpu_seconds(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """CPU-seconds of each step but the first, by process."""
    pairs = list(pairwise(lines))
    return {name: [b["cpu"][name] - a["cpu"].get(name, 0.0) for a, b in pairs] for name in lines[-1]["cpu"]}


def main() -> None:
    """Train, and write what it took."""
    spec = Spec.read(Path(sys.argv[1]))
    from comparison_settings import PROMPTS, SAMPLES, SETTINGS
    from cpu_times import OPTIONS, read_steps

    from buffer_rl import __version__
    from buffer_rl.args import CORE_SECTIONS
    from buffer_rl.driver.launch import launch_training
    from buffer_rl.observe.metrics import read_metrics
    from buffer_rl.options.section import compose
    from buffer_rl.plugin.registry import PluginRegistry

    common = {
        "run_dir": str(spec.folder / "run"),
        "save": str(spec.folder / "save"),
        "save_interval": spec.eval_every,
        "prompt_data": str(spec.rows),
        "rollout_shuffle": False,
        "hf_checkpoint": str(spec.start),
        "num_rollout": spec.steps,
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": SAMPLES,
        "rollout_max_response_len": spec.max_tokens,
        "rm_type": "exact_match",
        "rollout_seed": spec.seed,
        "seed": spec.seed,
        "advantage_estimator": "grpo",
        "loss_agg_mode": "token-mean",
        "rollout_temperature": 1.0,
        "weight_decay": 0.0,
        "max_tokens_per_gpu": 2048,
        "engine_max_running_requests": PROMPTS * SAMPLES,
        "progress": "none",
        "logger": OPTIONS["logger"],
        **SETTINGS,
    }
    args: Any = compose(CORE_SECTIONS).model_validate({**common, **spec.options})
    launch_training(args, PluginRegistry())
    metrics = read_metrics(args.run_dir)
    perf = [line for line in metrics if line["kind"] == "perf"]
    lines = read_steps(args.run_dir)
    start_s = seconds_of_process() - (time.monotonic() - lines[0]["time"]) - perf[0]["perf/step_time"]
    ends = [line["time"] for line in lines]
    spec.write_result(
        version=__version__,
        start_s=start_s,
        seconds=step_seconds(perf, ends, waits_for_saves=args.schedule in ("lockstep", "pipelined")),
        cpu=cpu_seconds(lines),
        ends=[end - ends[0] + perf[0]["perf/step_time"] for end in ends],  # since the first step began
        staleness=[line["staleness/mean"] for line in metrics if "staleness/mean" in line],
    )


if __name__ == "__main__":
    main()
