"""Wall time of a step against what it must take, under each schedule, with engines and a trainer of known cost.

    python benchmarks/schedules.py            # about fourteen minutes
    python benchmarks/schedules.py --quick    # half a minute: does everything work?

Nothing is computed: the engine answers a request after so many seconds a token, and the trainer sleeps for each token
of a batch, so that what a step must take is known exactly. Everything else is what a real run has: driver, Buffer,
rollout worker, router URL, Ray. Lengths are lognormal, by the request's sampling seed: all schedules generate the same
rollouts. The first step and the last one are left out. Two settings (costs: ``known_costs.py``):

queued     64 groups of 4 responses, of which the engine generates 16 at a time, as where a rollout is larger than what
           the engines hold; groups finish from early on
at once    16 groups of 4 responses, all generated together, so that most groups finish late

Columns, in seconds, medians over the steps:

T_gen      until the last response is there, by the engine's clock
streamed   the trainer's work on finished groups that may overlap with generation
formula    max(T_gen, streamed - tail) + tail + the rest, with the streamed work on the last group as the tail: what
           ``buffer_rl.observe.timeline_stats`` gives for such a step; in lockstep, the sum of all parts
path       critical path of the step: the trainer works on one finished group after another, in the order in which
           they are finished, and what must wait for the rollout's end follows. More than the formula where the trainer
           waits for the first group, or groups for the trainer
ours       wall - path; it does not depend on how long the step is

Exit status 1 if a row's median of wall / formula (``queued``) or wall / path (``at once``) is above 1.05. ``--quick``
runs one step of one row, and judges nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from known_costs import SAMPLES, SETTINGS, Setting
from schedule_bounds import (
    LOCKSTEP,
    MAX_LENGTH,
    MEAN_LENGTH,
    PIPELINED,
    STREAMED,
    Bounds,
    bounds,
    known_groups,
    response_length,
)

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.session import ray_session
from buffer_rl.driver.launch import launch_training
from buffer_rl.observe.timeline import read_trace
from buffer_rl.observe.timeline_stats import step_windows
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.testing.fake_engine import FakeEngine
from buffer_rl.testing.tiny import make_tiny_model

HERE = Path(__file__).resolve().parent
MOST = 1.05
SIGMAS = (0.5, 1.0, 1.5)
SCHEDULES = {
    LOCKSTEP: {"schedule": "lockstep"},
    PIPELINED: {"schedule": "pipelined"},
    STREAMED: {"schedule": "pipelined", "stream_gradients": True},
}
Steps = Sequence[tuple[float, Bounds]]
"""Wall time and bounds of each measured step."""


def make_task(folder: Path) -> None:
    """A tokenizer, and prompts that are all different and equally long."""
    make_tiny_model(folder / "model")
    rows = (json.dumps({"prompt": f"{number:06d}", "label": ""}) + "\n" for number in range(4096))
    (folder / "train.jsonl").write_text("".join(rows))


def run_schedule(folder: Path, setting: Setting, name: str, sigma: float, num_steps: int) -> Steps:
    """One run."""
    run_dir = folder / f"{setting.groups}_{name.replace(' ', '_')}_{sigma}"

    def latency(body: dict[str, Any]) -> float:
        return setting.decoded * response_length(int(body["sampling_params"]["sampling_seed"]), sigma)

    def respond(input_ids: list[int], seed: int) -> list[int]:
        return [3] * response_length(seed, sigma)

    timing: dict[str, Any] = {"latency": latency, "slots": setting.slots, "update_s": setting.publish}
    with FakeEngine(respond, decode=lambda ids: "", **timing) as engine:
        args = compose(CORE_SECTIONS).model_validate(
            {
                "run_dir": str(run_dir),
                "prompt_data": str(folder / "train.jsonl"),
                "hf_checkpoint": str(folder / "model"),
                "train_backend": f"{HERE / 'known_costs.py'}:{setting.trainer}",
                "router_url": engine.url,
                "engine_urls": [engine.url],
                "deterministic": True,  # a request a sample, with its seed
                "num_rollout": num_steps + 2,
                "rollout_batch_size": setting.groups,
                "n_samples_per_prompt": SAMPLES,
                "rollout_max_response_len": MAX_LENGTH,
                "rm_type": "exact_match",
                "use_kl_loss": True,
                "kl_loss_coef": 0.01,
                "max_logprob_diff": None,  # neither side computes its log-probabilities
                "weight_sync_mode": "disk",
                "logger": [],
                "progress": "none",
                **SCHEDULES[name],
            }
        )
        launch_training(args, PluginRegistry())  # type: ignore[arg-type]
        groups = known_groups(engine.log.requests, sigma, setting)
    windows = step_windows(read_trace(run_dir))
    measured = range(1, num_steps + 1)
    return [(windows[step][1] - windows[step][0], bounds(name, groups[step], setting)) for step in measured]


def of_bounds(steps: Steps) -> dict[str, float]:
    """The medians of wall / formula and wall / path."""
    return {
        "formula": statistics.median(wall / bound.formula for wall, bound in steps),
        "path": statistics.median(wall / bound.path for wall, bound in steps),
    }


def table_line(sigma: float, name: str, steps: Steps) -> str:
    """Medians; the ratios are medians of ratios."""
    columns: list[Iterable[float]] = [
        (bound.generation for _, bound in steps),
        (bound.streamed for _, bound in steps),
        (bound.formula for _, bound in steps),
        (bound.path for _, bound in steps),
        (wall for wall, _ in steps),
        (wall - bound.path for wall, bound in steps),
    ]
    numbers = "".join(f"{statistics.median(column):>10.3f}" for column in columns)
    ratios = of_bounds(steps)
    return f"{sigma:<6}{name:20}{numbers}{ratios['formula']:>14.3f}{ratios['path']:>12.3f}"


def main() -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each run")
    parser.add_argument("--setting", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--sigma", type=float, nargs="+", default=SIGMAS)
    parser.add_argument("--schedule", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--keep", type=Path, help="put the runs into this folder and keep them")
    parser.add_argument("--quick", action="store_true", help="one step of one row: does everything work?")
    flags = parser.parse_args()
    if flags.quick:
        flags.steps, flags.setting, flags.sigma, flags.schedule = 1, ["at once"], SIGMAS[:1], [STREAMED]
    too_slow: list[str] = []
    with tempfile.TemporaryDirectory() as name, ray_session(None):
        folder = flags.keep or Path(name)
        make_task(folder)
        for kind in flags.setting:
            print(heading(kind, flags.steps), flush=True)
            for sigma in flags.sigma:
                for schedule in flags.schedule:
                    steps = run_schedule(folder, SETTINGS[kind], schedule, sigma, flags.steps)
                    print(table_line(sigma, schedule, steps), flush=True)
                    too_slow += verdict(f"{kind}, {schedule}, sigma {sigma:g}", SETTINGS[kind], steps)
    for line in too_slow:
        print(line)
    return 1 if too_slow and not flags.quick else 0


def heading(kind: str, num_steps: int) -> str:
    """What is measured, and the names of the columns."""
    columns = "".join(f"{column:>10}" for column in ("T_gen", "streamed", "formula", "path", "wall", "ours"))
    what = f"{kind}: {SETTINGS[kind].groups} groups of {SAMPLES}, mean length {MEAN_LENGTH}, {num_steps} steps each"
    return f"{what}\n{'sigma':6}{'schedule':20}{columns}{'wall/formula':>14}{'wall/path':>12}"


def verdict(row: str, setting: Setting, steps: Steps) -> list[str]:
    """A line that says so, if the row's steps take too long."""
    against = "formula" if setting.by_formula else "path"
    ratio = of_bounds(steps)[against]
    return [] if ratio <= MOST else [f"wall/{against} {ratio:.3f}, above {MOST:g}: {row}"]


if __name__ == "__main__":
    sys.exit(main())
