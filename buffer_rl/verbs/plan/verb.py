"""``buffer-rl plan --trace RUN``: the speed of a run with other splits of devices and other schedules, from its costs.

The driver, the Buffer and the schedules are the real ones, in virtual time; see ``buffer_rl.observe.costs`` for what is
fitted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from buffer_rl.errors import ConfigError, DataError
from buffer_rl.observe.terminal import say
from buffer_rl.options.checks import refuse
from buffer_rl.plan.schedule import Mode, Schedule
from buffer_rl.verbs.table import print_table

if TYPE_CHECKING:
    from buffer_rl.verbs.plan.forecast import Forecast, Setup

GRADIENTS = "stream-gradients"
SCHEDULES = f"some of lockstep, pipelined, {GRADIENTS}, one-step-off, async:S:M"
DEFAULT_SCHEDULES = ("lockstep", "pipelined", GRADIENTS, "one-step-off", "async:1:2", "async:2:4")
NUM_STEPS = 16
_CORES = "cores that all processes share (default: those of the run's machine, if engines and trainer run on CPUs)"
ALL_SPLITS = 8
"""Devices up to which every split is tried; beyond, so many splits at most."""
COLUMNS = {
    "schedule": "{schedule}",
    "engines": "{engines}",
    "ranks": "{ranks}",
    "s a step": "{step_s:.3g}",
    "tokens/s": "{tokens_per_s:,.0f}",
    "engines busy": "{engines_busy:.0%}",
    "trainer busy": "{trainer_busy:.0%}",
    "staleness": "{staleness_mean:.2f}, at most {staleness_max}",
}
"""Heading to cell, of the values of a forecast."""


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "plan",
        description="Predict seconds per step and trained tokens per second of a run on other numbers of engines and\n"
        "trainer ranks, and with other schedules. It simulates the costs of the recorded run in virtual time.",
    )
    parser.add_argument(
        "--trace", metavar="RUN_DIR", required=True, help="the folder of a recorded run, of 8 steps or more"
    )
    parser.add_argument("--gpus", metavar="N", type=int, help="devices in all (default: as many as the run had)")
    chosen = ",".join(DEFAULT_SCHEDULES)
    parser.add_argument("--schedules", metavar="LIST", default=chosen, help=f"{SCHEDULES} (default: %(default)s)")
    parser.add_argument("--cores", metavar="N", type=float, help=_CORES)
    parser.add_argument(
        "--steps", metavar="N", type=int, default=NUM_STEPS, help="steps to simulate (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Print the plan. Raises ConfigError and DataError."""
    gpus, cores = namespace.gpus, namespace.cores
    refuse(gpus is not None and gpus < 2, f"--gpus: {gpus} are too few", expected="2 or more")
    refuse(cores is not None and not cores > 0, f"--cores: {cores} are too few", expected="more than 0")
    refuse(namespace.steps < 5, f"--steps: {namespace.steps} steps are too few", expected="5 or more")
    schedules = [parse_schedule(text) for text in namespace.schedules.split(",")]
    facts = make_plan(Path(namespace.trace), schedules, gpus, cores, namespace.steps)
    say(json.dumps(facts, indent=2)) if namespace.json else _print(facts)
    return 0


def parse_schedule(text: str) -> tuple[Schedule, bool]:
    """A schedule, and whether gradients are streamed; ``async`` is ``async:1:2``. Raises ConfigError."""
    asynchronous = re.fullmatch(r"async(?::(\d+):(\d+))?", text.strip())
    try:
        if asynchronous is not None:
            target, bound = asynchronous.groups()
            return Schedule(mode=Mode.ASYNC, target=int(target or 1), max_staleness=int(bound or 2)), False
        if text.strip() == GRADIENTS:
            return Schedule(mode=Mode.PIPELINED, streams=True), True
        mode = Mode(text.strip())
    except ValueError as error:
        what, expected = f"{text!r} is no schedule: {error}", f"{SCHEDULES}, with commas"
        raise ConfigError(what, where="--schedules", expected=expected) from error
    if mode is Mode.ONE_STEP_OFF:
        return Schedule(mode=mode, target=1, max_staleness=1, drains=True), False
    return Schedule(mode=mode, streams=mode is Mode.PIPELINED), False


def name_of(setup: Setup) -> str:
    """As ``parse_schedule`` reads it."""
    schedule = setup.schedule
    if schedule.by_window:
        return f"async:{schedule.target}:{schedule.max_staleness}"
    return GRADIENTS if setup.streams_gradients else str(schedule.mode)


def make_plan(
    folder: Path, schedules: Sequence[tuple[Schedule, bool]], gpus: int | None, cores: float | None, num_steps: int
) -> dict[str, Any]:
    """Fit the run in ``folder``, and simulate it with every schedule and split. Returns what was found, as JSON values;
    the best forecast has the most trained tokens per second. Raises ConfigError and DataError."""
    from buffer_rl.observe.costs import fitted
    from buffer_rl.verbs.plan.forecast import calibrated, forecast, write_prompts

    args = options_of(folder)
    setup, notes = setup_of(args, folder, cores)
    recorded = fitted(folder, setup)
    per_engine = int(args.rollout_num_gpus_per_engine)
    splits = splits_of(gpus or setup.ranks + setup.engines * per_engine, per_engine)
    with tempfile.TemporaryDirectory() as name:
        prompts = write_prompts(Path(name))
        costs = calibrated(recorded, setup, num_steps, prompts)
        current = forecast(recorded, costs, setup, num_steps, prompts)
        others = [
            replace(setup, schedule=schedule, streams_gradients=streams, engines=engines, ranks=ranks)
            for schedule, streams in schedules
            for engines, ranks in splits
        ]
        found = [forecast(recorded, costs, other, num_steps, prompts) for other in others]
    best = max(found, key=lambda each: each.tokens_per_s)
    return {
        "recorded": {"num_steps": recorded.num_steps, "measured_step_s": recorded.step_s, **_values(current)},
        "assumed": notes,
        "costs": asdict(costs),
        "residuals": dict(recorded.residuals),
        "unknown": list(recorded.unknown),
        "drops": recorded.drops,
        "forecasts": [{**_values(each), "best": each is best} for each in found],
    }


def splits_of(devices: int, per_engine: int = 1) -> list[tuple[int, int]]:
    """Engines and ranks that use all of so many devices. Raises ConfigError if there are too few."""
    most, expected = (devices - 1) // per_engine, f"{per_engine} for an engine and 1 for the trainer"
    refuse(most < 1, f"--gpus: {devices} devices are too few", expected=expected)
    if most < ALL_SPLITS:
        counts = list(range(1, most + 1))
    else:
        counts = sorted({max(1, round(most * part / ALL_SPLITS)) for part in range(1, ALL_SPLITS)})
    return [(engines, devices - engines * per_engine) for engines in counts]


def setup_of(args: Any, folder: Path, cores: float | None) -> tuple[Setup, list[str]]:
    """The configuration of a recorded run, and what was assumed. Raises ConfigError if it cannot be simulated."""
    from buffer_rl.observe.run_folder import read_facts
    from buffer_rl.plan.counts import with_counts
    from buffer_rl.verbs.plan.forecast import Setup

    args = with_counts(args)
    if args.colocate or args.offload_train or args.offload_rollout:
        what = "engines and trainer of this run take turns on their devices, which is not simulated"
        raise ConfigError(what, where=str(folder), expected="a run with devices for each")
    if args.schedule == Mode.ASYNC and args.stream_gradients:
        raise ConfigError("--stream-gradients is simulated with --schedule pipelined alone", where=str(folder))
    notes = ["checkpoints, evaluations and what older samples cost in learning are not counted"]
    facts = read_facts(folder)
    # A build of torch for CPUs finds no other device.
    on_cpus = {"cpu", "auto"} if facts.packages.get("torch", "").endswith("+cpu") else {"cpu"}
    if cores is None and {args.engine_device, args.train_device} <= on_cpus:
        noted = facts.cores
        cores = noted or len(os.sched_getaffinity(0))
        notes.append(f"all processes share {cores:g} cores" + ("" if noted else ", those of this machine"))
    elif cores is None:
        notes.append("each process has a device of its own; --cores N if they share cores")
    setup = Setup(
        schedule=Schedule.of(args),
        engines=args.rollout_num_engines,
        ranks=args.num_train_ranks,
        groups=args.rollout_batch_size,
        samples=args.n_samples_per_prompt,
        slots=args.engine_max_running_requests,
        cores=cores,
        streams_gradients=bool(args.stream_gradients),
    )
    return setup, notes


def options_of(folder: Path) -> Any:
    """The options of a recorded run, as ``run.json`` has them. Raises ConfigError and DataError."""
    from buffer_rl.args import CORE_SECTIONS
    from buffer_rl.observe.run_folder import RUN_FILE, read_facts
    from buffer_rl.options.section import compose

    if not folder.is_dir():
        raise ConfigError(f"there is no folder {str(folder)!r}", where="--trace", expected="a run's folder (--run-dir)")
    facts = read_facts(folder)
    if not facts.version:
        what = "there is no list of the run's options"
        raise DataError(what, where=str(folder / RUN_FILE), expected="the folder of a run")
    given: Mapping[str, Any] = {flag.removeprefix("--").replace("-", "_"): v for flag, v in facts.changed.items()}
    options: Any = compose(CORE_SECTIONS)
    return options.model_construct(**{name: v for name, v in given.items() if name in options.model_fields})


def _print(facts: Mapping[str, Any]) -> None:
    recorded = facts["recorded"]
    shown = "{schedule}, {engines} engines, {ranks} ranks, {num_steps} steps of {measured_step_s:.3g} s"
    predicted = f"{recorded['step_s']:.3g} s ({recorded['step_s'] / recorded['measured_step_s']:.2f})"
    say(f"recorded: {shown.format(**recorded)}; predicted {predicted}")
    for note in facts["assumed"]:
        say(f"assumed: {note}")
    say("costs: " + ", ".join(f"{name} {value:.3g} s" for name, value in facts["costs"].items() if value))
    say("median error of a fit: " + ", ".join(f"{name} {value:.0%}" for name, value in facts["residuals"].items()))
    for what in facts["unknown"]:
        say(f"not told by the trace: {what}")
    say("")
    rows = [_row("best" if found["best"] else "", found) for found in facts["forecasts"]]
    print_table(["", *COLUMNS], [_row("recorded", recorded), *rows], ["", *("bold" if row[0] else "" for row in rows)])


def _row(mark: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    return (mark, *(shown.format(**values) for shown in COLUMNS.values()))


def _values(found: Forecast) -> dict[str, Any]:
    stale = found.staleness or [0]
    measured = {name: getattr(found, name) for name in ("step_s", "tokens_per_s", "engines_busy", "trainer_busy")}
    return {
        "schedule": name_of(found.setup),
        "engines": found.setup.engines,
        "ranks": found.setup.ranks,
        **measured,
        "staleness_mean": fmean(stale),
        "staleness_max": max(stale),
    }
