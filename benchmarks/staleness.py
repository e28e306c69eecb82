"""What older samples cost in learning: held-out accuracy at fixed steps, by bound on staleness and by correction.

    python benchmarks/staleness.py                   # every correction, three seeds: half an hour
    python benchmarks/staleness.py --corrections "decoupled PPO"
    python benchmarks/staleness.py --write           # also the table and the picture of docs/evidence/schedules.md
    python benchmarks/staleness.py --quick           # a minute: does everything work?

The model, the task (``short``: words spelt backwards) and the settings are those of ``comparison_tasks.py``; ``--task
long`` takes its long sums. The target staleness is the bound, so that samples are as old as they may be: with M = 8
nine steps of groups are in production. At M = 0 every weight of a correction is 1, so one mode stands for all.
Accuracies are those of greedy decoding of 1,000 held-out prompts, by the weights of checkpoints: equal steps are
compared, not equal times, so that the load of the machine has little effect. Whatever comes out is written.

What has run is not run again unless ``--again``; results are lines of ``results.jsonl`` in the folder ``--output``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from against_trl import Comparison, Record
from algorithms_page import page_with
from comparison_tasks import TASKS, quick, start_model

from buffer_rl.observe.svg_chart import Line, line_chart, picture_file

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "evidence" / "schedules.md", ROOT / "docs" / "evidence" / "staleness.svg"
BEGIN, END = "<!-- written by benchmarks/staleness.py -->", "<!-- end of what benchmarks/staleness.py writes -->"
CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "decoupled PPO": {"loss_type": "decoupled_ppo"},
    "TIS": {"use_tis": True},
    "uncorrected": {"allow_uncorrected": True},
}
BOUNDS = (0, 2, 8)
EVAL_EVERY = 25
_WIDTH, _HEIGHT, _GAP = 308, 200, 14
Runs = dict[tuple[str, int], list[Record]]


def comparison(correction: str, bound: int, out: Path, again: bool) -> Comparison:
    """What runs a correction with a bound, on one core."""
    ages = {"schedule": "async", "stream_gradients": False, "max_staleness": bound, "target_staleness": bound}
    options = {**ages, **CORRECTIONS[correction]}
    return Comparison(out=out, cores=1, options=options, trl_python=sys.executable, again=again)


def cases(corrections: Sequence[str]) -> list[tuple[str, int]]:
    """Correction and bound of each case; a bound of 0 with the first correction alone."""
    return [(name, bound) for name in corrections for bound in BOUNDS if bound or name == next(iter(CORRECTIONS))]


def accuracies(runs: Sequence[Record]) -> dict[int, list[float]]:
    """Of each run, by step."""
    steps = sorted(int(step) for step in runs[0]["accuracy"])
    return {step: [run["accuracy"][str(step)] for run in runs] for step in steps}


def table(runs: Runs) -> str:
    """Markdown: a line a case; mean over seeds and range at each step that was evaluated, and mean staleness."""
    steps = next((list(accuracies(found)) for found in runs.values() if found), [])
    headings = ["loss", "M", "seeds", "mean staleness", *(f"step {step}" for step in steps)]
    rows = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for (correction, bound), found in runs.items():
        if not found:
            rows.append(f"| {correction} | {bound} | 0 | no result |{' |' * len(steps)}")
            continue
        ages = [value for run in found for value in run["staleness"]] or [0.0]
        cells = [correction, str(bound), str(len(found)), f"{fmean(ages):.2f}"]
        for values in accuracies(found).values():
            spread = f" ({min(values):.2f} to {max(values):.2f})" if max(values) > min(values) else ""
            cells.append(f"{fmean(values):.2f}{spread}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", *differences(runs), ""])


def differences(runs: Runs) -> Iterator[str]:
    """How far the last accuracy of each case is from that with a bound of 0, beside the ranges over seeds."""
    base = runs.get((next(iter(CORRECTIONS)), 0), [])
    if not base:
        return
    last = max(accuracies(base))
    current = accuracies(base)[last]
    yield f"After step {last}, compared with M = 0 ({fmean(current):.3f}, {min(current):.3f} to {max(current):.3f}):"
    yield ""
    for (correction, bound), found in runs.items():
        if bound and found:
            values = accuracies(found)[last]
            apart = max(values) < min(current) or min(values) > max(current)
            few = min(len(values), len(current)) < 2
            verdict = "one seed" if few else "the ranges are apart" if apart else "the ranges overlap"
            yield f"- {correction}, M {bound}: {fmean(values) - fmean(current):+.3f}; {verdict}."


def draw(runs: Runs) -> str:
    """A panel for each correction: the mean over seeds of each bound, and faint lines for the seeds."""
    parts = []
    base = runs.get((next(iter(CORRECTIONS)), 0), [])
    shown = [name for name in CORRECTIONS if any(found for (other, _), found in runs.items() if other == name)]
    width = 2 * _WIDTH if len(shown) == 1 else _WIDTH
    for number, correction in enumerate(shown):
        lines: list[Line] = []
        for colour, bound in enumerate(BOUNDS):
            found = runs.get((correction, bound), []) if bound else base
            if not found:
                continue
            name, by_step = f"M {bound}", accuracies(found)
            for index in range(len(found)):
                points = [(float(step), values[index]) for step, values in by_step.items()]
                lines.append(Line(name=name, points=points, colour=colour, faint=True))
            means = [(float(step), fmean(values)) for step, values in by_step.items()]
            lines.append(Line(name=name, points=means, colour=colour, marked=True, dashed=bound == 0))
        label = f"{correction}: held-out accuracy over steps"
        chart = line_chart(lines, label=label, width=width, height=_HEIGHT, unit_range=True)
        left = _GAP + number * (width + _GAP)
        parts.append(f'<text x="{left + 8}" y="22" class="heading">{escape(correction)}</text>')
        for colour, bound in enumerate(BOUNDS):
            x = left + 150 + 52 * colour
            parts.append(f'<rect class="bar c{colour}" x="{x}" y="12" width="11" height="11" rx="3"/>')
            parts.append(f'<text x="{x + 16}" y="22">M {bound}</text>')
        parts.append(chart.replace("<svg ", f'<svg x="{left}" y="30" width="{width}" height="{_HEIGHT}" ', 1))
    note = "Held-out accuracy over steps: mean of the seeds, faint lines the seeds; M 0 is dashed, and in every panel."
    bottom = 30 + _HEIGHT + 18
    parts.append(f'<text x="{_GAP + 8}" y="{bottom}">{note}</text>')
    label = "Held-out accuracy over steps by bound on staleness, a panel a loss"
    return picture_file(parts, label=label, width=_GAP + len(shown) * (width + _GAP), height=bottom + 14)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print and write; returns the exit status: 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corrections", nargs="+", choices=list(CORRECTIONS), default=list(CORRECTIONS))
    parser.add_argument("--task", choices=list(TASKS), default="short")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of each run, in place of the task's")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "staleness", help="folder of the results")
    parser.add_argument("--again", action="store_true", help="also what has run")
    short_or_published = parser.add_mutually_exclusive_group()
    short_or_published.add_argument("--quick", action="store_true", help="a few steps: does everything work?")
    short_or_published.add_argument(
        "--write", action="store_true", help="write the table and the picture in docs/evidence/"
    )
    args = parser.parse_args(argv)
    wanted = cases(args.corrections)
    if args.quick:
        args.seeds, wanted = [0], [("decoupled PPO", 0), ("uncorrected", 8)]
    task = quick(TASKS[args.task]) if args.quick else TASKS[args.task]
    steps = args.steps or task.steps
    task = replace(task, steps=steps, eval_every=min(EVAL_EVERY, steps // 2))
    out = args.output.absolute()
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # of the start model and the evaluations
    start_model(comparison("TIS", 0, out, False).start(task), task)
    runs: Runs = {case: [] for case in wanted}
    for seed in args.seeds:
        for case in wanted:
            one = comparison(*case, out, args.again)
            if (record := one.once(task, one.ours, seed)) is not None:
                runs[case].append(record)
    text, picture = table(runs), draw(runs)
    (out / "table.md").write_text(text, encoding="utf-8")
    (out / PICTURE.name).write_text(picture, encoding="utf-8")
    print(text)
    if args.write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), text, BEGIN, END), encoding="utf-8")
        PICTURE.write_text(picture, encoding="utf-8")
    return 0 if all(len(found) == len(args.seeds) for found in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
