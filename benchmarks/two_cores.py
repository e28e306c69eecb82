"""Steps an hour, and seconds to the same held-out accuracy, of every schedule on two cores that all processes share.

    python benchmarks/two_cores.py                  # every mode: half an hour on a quiet machine
    python benchmarks/two_cores.py --quick          # two minutes: does everything work?

The task is ``long`` of ``comparison_tasks.py``, with answers of 10 to 116 tokens. Each mode has the layout of processes
with which it is fastest: each of ``LAYOUTS`` is tried on a few steps first. Modes take turns, seed by seed. All that a
run does between its first step and its last is in the times, checkpoints included, since with asynchronous schedules
generation goes on meanwhile. The accuracy is that of greedy decoding by the weights in the checkpoints.

What has run is not run again unless ``--again``; results are lines of ``results.jsonl`` in the folder ``--output``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from against_trl import Comparison, Record, seconds_to, spread
from comparison_tasks import TASKS, Task, quick, start_model

HERE = Path(__file__).resolve().parent
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
"""Engines and trainer ranks, each a process with one thread."""
PROBE_STEPS, SKIPPED = 10, 3
CORRECTED = {"use_tis": True}
MODES: Mapping[str, Mapping[str, Any]] = {
    "lockstep": {"schedule": "lockstep", "stream_gradients": False},
    "pipelined": {"schedule": "pipelined", "stream_gradients": False},
    "pipelined --stream-gradients": {"schedule": "pipelined", "stream_gradients": True},
    "one-step-off": {"schedule": "one-step-off", "stream_gradients": False, **CORRECTED},
    "async, M 1": {"schedule": "async", "stream_gradients": False, "max_staleness": 1, **CORRECTED},
    "async, M 2": {"schedule": "async", "stream_gradients": False, "max_staleness": 2, **CORRECTED},
    "async, M 4": {"schedule": "async", "stream_gradients": False, "max_staleness": 4, **CORRECTED},
}
HEADER = ("mode", "engines, ranks", "runs", "steps an hour", "/ lockstep", "s to accuracy", "/ lockstep", "at the end")


def seconds_of(record: Record) -> list[float]:
    """Of each step, from the end of the one before, with everything in it."""
    return [after - before for before, after in pairwise([0.0, *record["ends"]])]


def steps_an_hour(record: Record) -> float:
    """Without the first steps, which fill the pipeline."""
    ends = record["ends"][SKIPPED - 1 :]
    return 3600 * (len(ends) - 1) / (ends[-1] - ends[0])


class Modes:
    """The runs of all modes, and what they found."""

    def __init__(self, out: Path, task: Task, again: bool) -> None:
        self._out, self._task, self._again = out, task, again

    def comparison(self, mode: str, layout: tuple[int, int]) -> Comparison:
        """What runs a mode with a layout."""
        engines, ranks = layout
        options = {**MODES[mode], "rollout_num_engines": engines, "num_train_ranks": ranks}
        return Comparison(out=self._out, cores=2, options=options, trl_python=sys.executable, again=self._again)

    def best_layout(self, mode: str, layouts: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """The one with the most steps an hour, each tried once on a few steps; None if none runs."""
        if len(layouts) == 1:
            return layouts[0]
        short = replace(self._task, steps=PROBE_STEPS, eval_every=PROBE_STEPS + 1)
        tried = {}
        for layout in layouts:
            comparison = self.comparison(mode, layout)
            if (record := comparison.once(short, comparison.ours, 0, "probe")) is not None:
                tried[layout] = steps_an_hour(record)
                print(f"{mode}, {layout[0]} engines, {layout[1]} ranks: {tried[layout]:.0f} steps an hour", flush=True)
        return max(tried, key=lambda layout: tried[layout], default=None)

    def run(self, mode: str, layout: tuple[int, int], seed: int) -> Record | None:
        """One run of a mode."""
        comparison = self.comparison(mode, layout)
        return comparison.once(self._task, comparison.ours, seed)


def table(
    task: Task, layouts: Mapping[str, tuple[int, int] | None], records: Mapping[str, Sequence[Record]]
) -> Iterator[str]:
    """Markdown: a line a mode, medians and ranges over seeds, and ratios of medians to lockstep."""
    yield f"Two cores; seconds to an accuracy of {task.target:.2f}; {task.steps} steps a run."
    yield ""
    yield "| " + " | ".join(HEADER) + " |"
    yield "|---" * len(HEADER) + "|"
    base: tuple[float, float | None] | None = None
    for mode, runs in records.items():
        if not runs:
            continue
        rates = [steps_an_hour(run) for run in runs]
        found = [seconds_to(task.target, {**run, "seconds": seconds_of(run)}) for run in runs]
        reached = [seconds for seconds in found if seconds is not None]
        rate = statistics.median(rates)
        seconds = statistics.median(reached) if len(reached) == len(runs) else None
        base = base or (rate, seconds)
        engines, ranks = layouts[mode] or (0, 0)
        missing = "" if len(reached) == len(runs) else f", {len(reached)} of {len(runs)} reach it"
        cells = [
            mode,
            f"{engines}, {ranks}",
            str(len(runs)),
            spread(rates, 0),
            f"{rate / base[0]:.2f}",
            spread(reached, 0) + missing,
            f"{seconds / base[1]:.2f}" if seconds and base[1] else "-",
            spread([run["accuracy"][max(run["accuracy"], key=int)] for run in runs], 2),
        ]
        yield "| " + " | ".join(cells) + " |"
    loads = [run["load"] for runs in records.values() for run in runs]
    yield ""
    yield f"Load average before a run: {spread(loads, 1)}."


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and print the table; returns the exit status: 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="of each run, in place of the task's")
    parser.add_argument(
        "--output", type=Path, default=HERE.parent / "build" / "two_cores", help="folder of the results"
    )
    parser.add_argument("--again", action="store_true", help="also what has run")
    parser.add_argument("--quick", action="store_true", help="short answers, a few steps: does everything work?")
    args = parser.parse_args(argv)
    task, layouts = quick(TASKS["short"]) if args.quick else TASKS["long"], LAYOUTS
    if args.quick:
        args.modes, layouts = [args.modes[0], args.modes[-1]], LAYOUTS[:1]
    steps = args.steps or task.steps
    task = replace(task, steps=steps, eval_every=min(task.eval_every, steps // 2))
    out = args.output.absolute()
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # of the start model and the evaluations
    modes = Modes(out, task, args.again)
    start_model(modes.comparison(args.modes[0], layouts[0]).start(task), task)
    chosen = {mode: modes.best_layout(mode, layouts) for mode in args.modes}
    records: dict[str, list[Record]] = {mode: [] for mode in args.modes}
    for seed in args.seeds:
        for mode, layout in chosen.items():
            if layout is not None and (record := modes.run(mode, layout, seed)) is not None:
                records[mode].append(record)
    print("\n".join(table(task, chosen, records)), flush=True)
    return 0 if all(len(runs) == len(args.seeds) for runs in records.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
