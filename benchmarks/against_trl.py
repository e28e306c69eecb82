"""Seconds a step, and to the same held-out accuracy, of buffer_rl and of TRL's GRPO, in turns on this machine.

    pip install -e '.[bench]'
    python benchmarks/against_trl.py                            # both tasks, three seeds, two cores: half an hour
    python benchmarks/against_trl.py --schedule pipelined --stream-gradients
    python benchmarks/against_trl.py --quick                    # two minutes: does everything work?

Both systems train the same start model on the same prompts with the same settings (``comparison_settings.py``), 32
prompts with 16 samples a step, generation included. Each run is a process with its children; the systems take turns, so
that neither has the quieter machine. TRL first shows on a few steps with how many threads, and in micro-batches of what
size, it is fastest here. Times begin with the first step; ``start`` is what comes before it. Held-out accuracy is that
of greedy decoding, by one code for both, from weights saved at the same steps; evaluating is not in the times, nor is
saving, except with ``--schedule one-step-off`` and ``async``, which generate meanwhile. Between two evaluations the
accuracy is taken to be on a straight line.

What has run is not run again unless ``--again``: results are lines of ``results.jsonl`` in the folder ``--output``, and
an interrupted comparison goes on. The table has all results there of the asked tasks and cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from algorithms import execute
from comparison_ours import RESULT, Spec
from comparison_settings import PROMPTS, SAMPLES
from comparison_tasks import TASKS, Task, held_out_accuracy, quick, rows, start_model, write_rows

HERE = Path(__file__).resolve().parent
TRL = "TRL"
MICRO_BATCHES = (512, 64)
PROBE_STEPS = 8
TIMEOUT_S = 7200.0
HEADER = ("system", "runs", "s a step", "faster", "CPU s a step", "s to accuracy", "faster", "at the end", "start, s")
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Where results are, and how systems are run. options: of buffer_rl. trl_python: an interpreter that has TRL."""

    out: Path
    cores: int
    options: Mapping[str, Any]
    trl_python: str
    again: bool = False

    @property
    def ours(self) -> str:
        """The name of buffer_rl with its options in the table."""
        schedule, streams, *more = self.options.items()
        shown = [f"{name}={value}" for name, value in more]
        return " ".join(["buffer_rl", schedule[1], *["streamed"] * streams[1], *shown])

    def records(self) -> list[Record]:
        """What has run."""
        path = self.out / "results.jsonl"
        return [json.loads(line) for line in path.read_bytes().split(b"\n") if line] if path.exists() else []

    def found(self, **key: Any) -> Record | None:
        """The newest record with these values."""
        return next((r for r in reversed(self.records()) if all(r.get(n) == v for n, v in key.items())), None)

    def once(self, task: Task, system: str, seed: int, kind: str = "run", **settings: Any) -> Record | None:
        """Run a system, unless there is a record of it; None if it failed, which is printed."""
        key = {"kind": kind, "task": task.name, "system": system, "seed": seed, "cores": self.cores}
        key |= {"steps": task.steps, **({"settings": settings} if system == TRL else {})}
        if not self.again and (record := self.found(**key)) is not None:
            return record
        name = "_".join(
            [kind, *f"{task.name} {system} seed {seed} cores {self.cores}".split(), *map(str, settings.values())]
        )
        folder, load = self.out / name, os.getloadavg()[0]
        shutil.rmtree(folder, ignore_errors=True)
        spec = self._spec(task, folder, seed, settings)
        program, python = ("trl", self.trl_python) if system == TRL else ("ours", sys.executable)
        command = [python, str(HERE / f"comparison_{program}.py"), str(spec.write())]
        print(f"{kind}: {task.name}, {system} {settings or ''}, seed {seed}", flush=True)
        if (problem := execute(command, self.out / f"{name}.log", TIMEOUT_S)) is not None:
            print(f"{name}: {problem}", flush=True)
            return None
        measured = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        accuracy = self._accuracy(task, spec) if kind == "run" else {}
        record = {**key, "settings": settings, "load": load, **measured, "accuracy": accuracy}
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        shutil.rmtree(folder)
        return record

    def _spec(self, task: Task, folder: Path, seed: int, settings: Mapping[str, Any]) -> Spec:
        folder.mkdir(parents=True)
        data = folder / "train.jsonl"
        write_rows(data, rows(task, PROMPTS * task.steps, f"train {seed}"))
        return Spec(
            folder=folder,
            start=self.start(task),
            rows=data,
            max_tokens=task.max_tokens,
            steps=task.steps,
            eval_every=task.eval_every,
            seed=seed,
            cores=self.cores,
            options=self.options,
            **settings,
        )

    def _accuracy(self, task: Task, spec: Spec) -> dict[str, float]:
        saved = range(task.eval_every, task.steps + 1, task.eval_every)
        return {"0": self.start_accuracy(task), **{str(s): held_out_accuracy(spec.weights(s), task) for s in saved}}

    def start(self, task: Task) -> Path:
        """The folder of the start model."""
        return self.out / f"start_{task.name}"

    def start_accuracy(self, task: Task) -> float:
        """That of the start model."""
        first = self.found(kind="run", task=task.name)
        return float(first["accuracy"]["0"]) if first is not None else held_out_accuracy(self.start(task), task)

    def best_of_trl(self, task: Task) -> dict[str, int]:
        """Threads and micro-batch with which TRL's steps are shortest here, each tried once on a few steps."""
        short, tried = replace(task, steps=PROBE_STEPS, eval_every=PROBE_STEPS + 1), {}
        for threads in range(1, self.cores + 1):
            for micro_batch in MICRO_BATCHES:
                record = self.once(short, TRL, 0, "probe", threads=threads, micro_batch=micro_batch)
                if record is not None:
                    tried[threads, micro_batch] = statistics.median(record["seconds"][2:])
        if not tried:
            raise SystemExit("TRL does not run; its log says why. Install it: pip install -e '.[bench]'")
        threads, micro_batch = min(tried, key=lambda choice: tried[choice])
        return {"threads": threads, "micro_batch": micro_batch}

    def compare(self, task: Task, seeds: Sequence[int], trl: Mapping[str, int]) -> None:
        """Run both systems with each seed, in turns; the one that begins alternates."""
        for seed in seeds:
            turns = [(TRL, trl), (self.ours, {})]
            for system, settings in turns if seed % 2 else reversed(turns):
                self.once(task, system, seed, **settings)


def seconds_to(target: float, record: Record) -> float | None:
    """Training seconds until the accuracy is ``target``, on straight lines between evaluations; None if it never is."""
    known = sorted((int(step), accuracy) for step, accuracy in record["accuracy"].items())
    if known[0][1] >= target:
        return 0.0
    for (first, low), (last, high) in pairwise(known):
        if high >= target:
            share = (target - low) / (high - low)
            return float(sum(record["seconds"][:first]) + share * sum(record["seconds"][first:last]))
    return None


def cpu_a_step(record: Record) -> dict[str, float]:
    """CPU-seconds of a step by process: the mean of all but the first and those after which weights were saved."""
    saved = {int(step) for step in record["accuracy"]}
    steps = len(record["seconds"])
    kept = {}
    for name, seconds in record["cpu"].items():
        skipped = steps - len(seconds)  # at the start
        numbered = [(number, value) for number, value in enumerate(seconds, start=skipped + 1) if number > 1]
        usual = [value for number, value in numbered if number not in saved] or [value for _, value in numbered]
        kept[name] = statistics.fmean(usual)
    return kept


def spread(values: Sequence[float], digits: int) -> str:
    """Median and range."""
    if not values:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def table(task: Task, cores: int, records: Sequence[Record]) -> Iterator[str]:
    """Markdown: one line a system: medians and ranges over its runs, and how many times as fast as TRL it is."""
    chosen = [r for r in records if (r["kind"], r["task"], r["cores"]) == ("run", task.name, cores)]
    chosen = [r for r in chosen if r["steps"] == task.steps]
    newest = {(r["system"], r["seed"]): r for r in chosen}
    systems: dict[str, list[Record]] = {}
    for (system, _), record in sorted(newest.items(), key=lambda item: item[0]):
        systems.setdefault(system, []).append(record)
    start = ", ".join(sorted({f"{record['accuracy']['0']:.2f}" for record in chosen}))
    yield f"### {task.name}: {PROMPTS} x {SAMPLES} samples, {cores} {'core' if cores == 1 else 'cores'}"
    yield ""
    yield f"Seconds to an accuracy of {task.target:.2f}, from {start}."
    yield ""
    yield "| " + " | ".join(HEADER) + " |"
    yield "|---" * len(HEADER) + "|"
    base = _times(task, systems.get(TRL, []))
    base = (base[0], base[1] if len(base[1]) == len(base[0]) else [])  # what some runs do not reach is not compared
    for system, runs in systems.items():
        steps, reached = _times(task, runs)
        processes = [cpu_a_step(run) for run in runs]
        cells = [
            _title(system, runs[0]),
            str(len(runs)),
            spread(steps, 2),
            _ratio(base[0], steps),
            spread([sum(used.values()) for used in processes], 2),
            spread(reached, 0) + ("" if len(reached) == len(runs) else f", {len(reached)} of {len(runs)} reach it"),
            _ratio(base[1], reached if len(reached) == len(runs) else []),
            spread([run["accuracy"][max(run["accuracy"], key=int)] for run in runs], 2),
            spread([run["start_s"] for run in runs], 0),
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    for system, runs in systems.items():
        used = [cpu_a_step(run) for run in runs]
        means = {name: statistics.median(one.get(name, 0.0) for one in used) for one in used for name in one}
        parts = ", ".join(f"{name} {value:.3f}" for name, value in sorted(means.items(), key=lambda item: -item[1]))
        yield f"CPU-seconds a step, {_title(system, runs[0])}: {parts}."
    loads = [run["load"] for runs in systems.values() for run in runs]
    yield f"Load average before a run: {spread(loads, 1)}."


def _title(system: str, record: Record) -> str:
    settings = record["settings"]
    plural = "s" * (settings.get("threads") != 1)
    more = f" ({settings['threads']} thread{plural}, micro-batches of {settings['micro_batch']})" if settings else ""
    return f"{system} {record['version']}{more}"


def _times(task: Task, runs: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Of each run: the median step, without the first; seconds to the target, of those that reach it."""
    found = [seconds_to(task.target, run) for run in runs]
    return [statistics.median(run["seconds"][1:]) for run in runs], [value for value in found if value is not None]


def _ratio(base: Sequence[float], values: Sequence[float]) -> str:
    return f"{statistics.median(base) / statistics.median(values):.2f}x" if base and values else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and print the tables; returns the exit status: 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cores", type=int, choices=(1, 2), default=2, help="that a run and its children share")
    schedules = ("lockstep", "pipelined", "one-step-off", "async")
    parser.add_argument("--schedule", choices=schedules, default="lockstep", help="of buffer_rl")
    parser.add_argument("--stream-gradients", action="store_true", help="of buffer_rl, with --schedule pipelined")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="more options of buffer_rl")
    parser.add_argument("--steps", type=int, help="of each run, in place of the task's")
    parser.add_argument("--trl", type=int, nargs=2, metavar=("THREADS", "MICRO_BATCH"), help="of TRL, untried")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL")
    parser.add_argument(
        "--output", type=Path, default=HERE.parent / "build" / "against_trl", help="folder of the results"
    )
    parser.add_argument("--again", action="store_true", help="also what has run")
    parser.add_argument("--table", action="store_true", help="run nothing, print the tables of what has run")
    parser.add_argument("--quick", action="store_true", help="short answers, a few steps: does everything work?")
    args = parser.parse_args(argv)
    more = dict(item.split("=", 1) for item in args.set)
    comparison = Comparison(
        out=args.output.absolute(),
        cores=args.cores,
        options={"schedule": args.schedule, "stream_gradients": args.stream_gradients, **more},
        trl_python=args.trl_python,
        again=args.again,
    )
    comparison.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # of the start models and the evaluations
    tasks = [quick(TASKS["short"])] if args.quick else [TASKS[name] for name in args.tasks]
    tasks = [replace(t, steps=args.steps or t.steps) for t in tasks]
    tasks = [replace(t, eval_every=min(t.eval_every, t.steps // 2)) for t in tasks]
    seeds = args.seeds[:1] if args.quick else args.seeds
    for task in [] if args.table else tasks:
        start_model(comparison.start(task), task)
        untried = (1, 512) if args.quick else args.trl
        trl = dict(zip(("threads", "micro_batch"), untried, strict=True)) if untried else comparison.best_of_trl(task)
        comparison.compare(task, seeds, trl)
    records = comparison.records()
    for task in tasks:
        print("\n".join(table(task, args.cores, records)), flush=True)
    wanted = {(task.name, system, seed) for task in tasks for system in (TRL, comparison.ours) for seed in seeds}
    return 0 if wanted <= {(r["task"], r["system"], r["seed"]) for r in records if r["kind"] == "run"} else 1


if __name__ == "__main__":
    sys.exit(main())
