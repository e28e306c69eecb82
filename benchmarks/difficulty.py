"""Prompts by difficulty against shuffled prompts: held-out accuracy after equal numbers of steps.

    python benchmarks/difficulty.py                  # three seeds of each order: ten minutes on one core
    python benchmarks/difficulty.py --write          # also the table of docs/evidence/benchmarks.md
    python benchmarks/difficulty.py --quick          # a minute: does everything work?

Half of the rows are worth training on: words of 3 to 10 letters, spelt backwards, as in ``comparison_tasks.py``, whose
model and settings these are. A quarter are solved at the start (words of one letter), and a quarter cannot be solved
(the answer is another word). Held-out prompts are of the first kind alone. Accuracies are those of greedy decoding, by
the weights of checkpoints; each seed has rows of its own, the same for all orders. Whatever comes out is written.

What has run is not run again unless ``--again``; results are lines of ``results.jsonl`` in the folder ``--output``.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from against_trl import Comparison, Record
from algorithms_page import page_with
from comparison_ours import Spec
from comparison_tasks import TASKS, Task, quick, reversed_word, start_model, write_rows

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "evidence" / "benchmarks.md"
BEGIN, END = "<!-- written by benchmarks/difficulty.py -->", "<!-- end of what benchmarks/difficulty.py writes -->"
ORDERS: Mapping[str, Mapping[str, Any]] = {
    "shuffled": {},
    "difficulty": {"prompt_order": "difficulty"},
    "difficulty, 0:0,mid:1,1:0": {"prompt_order": "difficulty", "difficulty_weights": "0:0,mid:1,1:0"},
}
NUM_ROWS, STEPS, EVAL_EVERY = 1024, 75, 25
Runs = Mapping[str, Sequence[Record]]


def known_or_new(rng: random.Random) -> tuple[str, str]:
    """A word for the warm-up: of one letter in a third of the cases, so that the start model solves these."""
    prompt, answer = reversed_word(rng)
    return (f"{prompt[0]}=", prompt[0]) if rng.random() < 1 / 3 else (prompt, answer)


def uneven_rows(seed: int, num_rows: int) -> list[tuple[str, str]]:
    """Rows of which a quarter are solved and a quarter cannot be."""
    rng = random.Random(f"difficulty {seed}")
    found = []
    for number in range(num_rows):
        prompt, answer = reversed_word(rng)
        kinds = {0: (f"{prompt[0]}=", prompt[0]), 1: (prompt, f"{answer}{prompt[0]}")}
        found.append(kinds.get(number % 4, (prompt, answer)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven(Comparison):
    """Runs an order of prompts on rows of which half teach nothing."""

    num_rows: int

    def _spec(self, task: Task, folder: Path, seed: int, settings: Mapping[str, Any]) -> Spec:
        spec = Comparison._spec(self, task, folder, seed, settings)
        write_rows(spec.rows, uneven_rows(seed, self.num_rows))
        return spec


def comparison(order: str, out: Path, again: bool, num_rows: int = NUM_ROWS) -> Uneven:
    """What runs an order, on one core."""
    options = {"schedule": "lockstep", "stream_gradients": False, "rollout_shuffle": True, **ORDERS[order]}
    return Uneven(out=out, cores=1, options=options, trl_python=sys.executable, again=again, num_rows=num_rows)


def table(runs: Runs) -> str:
    """Markdown: a line an order; mean over seeds and range at each step that was evaluated, then the comparison."""
    steps = next((sorted(map(int, found[0]["accuracy"])) for found in runs.values() if found), [])
    lines = [f"| order | seeds | {' | '.join(f'step {step}' for step in steps)} |", "|---" * (2 + len(steps)) + "|"]
    for order, found in runs.items():
        cells = [order, str(len(found))]
        for step in steps if found else ():
            values = [run["accuracy"][str(step)] for run in found]
            cells.append(f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *differences(runs, str(max(steps, default=0))), ""])


def differences(runs: Runs, last: str) -> list[str]:
    """How far each order is from shuffled rows after the last step, seed by seed."""
    base = {run["seed"]: run["accuracy"][last] for run in runs.get("shuffled", ())}
    found = []
    for order, records in runs.items():
        apart = [run["accuracy"][last] - base[run["seed"]] for run in records if run["seed"] in base]
        if order == "shuffled" or not apart:
            continue
        signs = {value > 0 for value in apart}
        verdict = "one seed" if len(apart) < 2 else "the same sign in all seeds" if len(signs) == 1 else "a null"
        shown = ", ".join(f"{value:+.3f}" for value in apart)
        found.append(f"- {order}, compared with shuffled after step {last}: {fmean(apart):+.3f} ({shown}): {verdict}.")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print and write; returns the exit status: 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=list(ORDERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "difficulty", help="folder of the results")
    parser.add_argument("--again", action="store_true", help="also what has run")
    short_or_published = parser.add_mutually_exclusive_group()
    short_or_published.add_argument("--quick", action="store_true", help="a few steps: does everything work?")
    short_or_published.add_argument("--write", action="store_true", help="write the table in docs/evidence/")
    args = parser.parse_args(argv)
    full = replace(TASKS["short"], name="uneven", steps=STEPS, eval_every=EVAL_EVERY)
    task, num_rows = full, NUM_ROWS
    if args.quick:
        task, num_rows, args.seeds, args.orders = quick(full), 64, [0], ["difficulty"]
        task = replace(task, eval_every=task.steps)
    out = args.output.absolute()
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # of the start model and the evaluations
    warm_up = replace(task, row=known_or_new, warm_up=0.0 if args.quick else 1 / 3)
    start_model(comparison("shuffled", out, False).start(task), warm_up)
    runs: dict[str, list[Record]] = {order: [] for order in args.orders}
    for seed in args.seeds:
        for order in args.orders:
            one = comparison(order, out, args.again, num_rows)
            if (record := one.once(task, one.ours, seed)) is not None:
                runs[order].append(record)
    text = table(runs)
    (out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    if args.write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), text, BEGIN, END), encoding="utf-8")
    return 0 if all(len(found) == len(args.seeds) for found in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
