"""Several runs on one page: a colour for each, what was learned and how long it took, and the options that differ."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from buffer_rl.errors import ConfigError
from buffer_rl.observe.checks import Check, checks_of
from buffer_rl.observe.curve import Series, curves_of
from buffer_rl.observe.figures import CHARTS, Figure, line_figure
from buffer_rl.observe.gains import EvalGain, eval_gains
from buffer_rl.observe.metrics import steps_of
from buffer_rl.observe.page import render_page
from buffer_rl.observe.progress import format_duration
from buffer_rl.observe.report import MARKS, Report, end_text
from buffer_rl.observe.svg_chart import COLOURS, Line, Points
from buffer_rl.options.redaction import MASK

MAX_RUNS = COLOURS
"""As many as there are colours: a page of more could not be read."""
COMPARISON_FILE = "comparison.html"
_MISSING = object()
_DIFFER_ALWAYS = {"--run-dir"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run: its name, its colour on the whole page, and what the page's tables say of it."""

    name: str
    colour: int
    report: Report
    checks: Sequence[Check]
    gains: Mapping[str, EvalGain]
    figures: Mapping[str, str]

    @classmethod
    def of(cls, name: str, colour: int, report: Report) -> ComparedRun:
        """What the files of a run say."""
        steps = steps_of(report.metrics)
        seconds = [metrics["perf/step_time"] for metrics in steps.values() if "perf/step_time" in metrics]
        first = max(report.facts.start.values(), default=None)
        figures = {
            "training steps": str(len(steps)),
            "time in steps": format_duration(sum(seconds)) if seconds else "",
            "median step": f"{median(seconds):.2f} s" if seconds else "",
            "start-up": "" if first is None else f"{first:.1f} s",
            "ended": end_text(report.facts),
        }
        gains = {gain.name: gain for gain in eval_gains(report.metrics)}
        checks = checks_of(report)
        return cls(name=name, colour=colour, report=report, checks=checks, gains=gains, figures=figures)


def render_comparison(reports: Sequence[Report], title: str = "") -> str:
    """The page as text. Raises ConfigError for more runs than ``MAX_RUNS``."""
    if len(reports) > MAX_RUNS:
        raise ConfigError(f"{len(reports)} runs are too many for one page", expected=f"at most {MAX_RUNS}")
    names = unique_names([report.title for report in reports])
    runs = [ComparedRun.of(*each) for each in zip(names, range(len(names)), reports, strict=True)]
    return render_page(
        "comparison.html",
        title=title or " · ".join(names),
        runs=runs,
        marks=MARKS,
        sets=list(dict.fromkeys(name for run in runs for name in run.gains)),
        figures=[name for name in runs[0].figures if any(run.figures[name] for run in runs)],
        options=differing_options(runs),
        charts=_charts(runs),
        legend={run.name: run.colour for run in runs},
    )


def unique_names(paths: Sequence[str]) -> list[str]:
    """The last parts of the paths, as many as tell all of them apart; equal paths get a number."""
    parts = [Path(os.path.normpath(path)).parts for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, start=1)]


def differing_options(runs: Sequence[ComparedRun]) -> dict[str, list[str | None]]:
    """The value in each run as JSON, by flag, of the options that are not the same in all. None: the default, of a run
    that noted only what differs from it.

    Secrets are left out, and so is the run's own folder."""
    facts = [run.report.facts for run in runs]
    flags = dict.fromkeys(flag for each in facts for flag in (*each.changed, *each.options))
    found = {}
    for flag in flags:
        values = [each.option(flag, _MISSING) for each in facts]
        if flag not in _DIFFER_ALWAYS and MASK not in values and any(value != values[0] for value in values):
            found[flag] = [None if value is _MISSING else json.dumps(value, ensure_ascii=False) for value in values]
    return found


def _charts(runs: Sequence[ComparedRun]) -> list[Figure]:
    curves = [curves_of(run.report.metrics) for run in runs]
    sets = dict.fromkeys(name for each in curves for name in each.evals)
    figures = [
        _over_runs(f"Evaluation: {name}", runs, [each.evals.get(name, Series()).points for each in curves], marked=True)
        for name in sets
    ]
    figures.append(_over_runs("Training reward", runs, [each.reward.points for each in curves]))
    steps = [steps_of(run.report.metrics) for run in runs]
    for heading, names in {**CHARTS, "Seconds of a step": {"": "perf/step_time"}}.items():
        line, metric = next(iter(names.items()))  # of several lines the first, as there is one line a run
        points = [[(step, metrics[metric]) for step, metrics in each.items() if metric in metrics] for each in steps]
        figures.append(_over_runs(f"{heading}: {line}" if len(names) > 1 else heading, runs, points, wide=False))
    return [figure for figure in figures if figure.picture]


def _over_runs(
    heading: str, runs: Sequence[ComparedRun], points: Sequence[Points], *, marked: bool = False, wide: bool = True
) -> Figure:
    """A chart with one line a run, in its colour. Every other line is dashed, so that lines differ not by their colours
    alone. points: of each run."""
    lines = [
        Line(name=run.name, points=of_run, colour=run.colour, marked=marked, dashed=run.colour % 2 == 1)
        for run, of_run in zip(runs, points, strict=True)
    ]
    return line_figure(heading, lines, {}, wide=wide)
