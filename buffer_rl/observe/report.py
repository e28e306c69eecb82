"""The HTML report of a run: one self-contained page, which needs no network. What a run learned, and where its files
are, in the terminal at its end.

``templates/report.html`` is the page. It escapes every text; only pictures, style and script are put in as they are.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from buffer_rl.errors import ConfigError
from buffer_rl.files.remote import local_path
from buffer_rl.observe.curve import ALL_NAME, CURVE_FILE, REWARD_NAME, curves_of, moving_mean, sparkline, write_curve
from buffer_rl.observe.metrics import METRICS_FILE, PARTS_OF_ROLLOUTS, drops_of, read_metrics
from buffer_rl.observe.progress import format_duration
from buffer_rl.observe.run_folder import SAMPLES_FILE, RunFacts, read_facts, read_jsonl
from buffer_rl.observe.startup import text_of
from buffer_rl.observe.svg_chart import (
    COLOURS,
    TEMPLATES,
    Line,
    format_number,
    format_seconds,
    headline,
    line_chart,
    names_shown,
    stacked_bars,
    step_picture,
)
from buffer_rl.observe.terminal import printable
from buffer_rl.observe.timeline import TRACE_FILE, read_trace
from buffer_rl.observe.timeline_stats import (
    Spans,
    StepStats,
    advice,
    chosen_steps,
    overlap_of,
    spans_within,
    step_stats,
    step_windows,
)

REPORT_FILE = "report.html"
MAX_STEPS = 12  # rollouts of a kind whose samples are shown, spread evenly, the first and the last one among them
MAX_PER_STEP = 16
MAX_CHARACTERS = 4000  # of one cell; the file has the rest
_SMOOTHING_STEPS = 9
# Small charts: heading, and the metric of each line by the line's name.
_CHARTS = (
    ("Loss", {"loss": "train/loss", "critic": "critic/loss"}),
    ("Entropy (nats)", {"entropy": "train/entropy"}),
    ("Gradient norm", {"gradient norm": "train/grad_norm", "critic": "critic/grad_norm"}),
    ("Variance of returns that values explain", {"explained": "critic/explained_variance"}),
    ("KL divergence (nats a token)", {"to the reference": "train/kl_loss", "to the teacher": "train/opd_reverse_kl"}),
    ("Response length (tokens)", {"mean": "rollout/response_len/mean", "longest": "rollout/response_len/max"}),
    ("Share of truncated responses", {"truncated": "rollout/truncated_ratio"}),
    ("Tokens per second", {"tokens per second": "perf/tokens_per_s"}),
    ("Staleness (weight versions)", {"mean": "staleness/mean", "largest": "staleness/max"}),
    (
        "Groups left when a step was chosen",
        {"live": "production/live_groups", "finished": "production/finished_groups"},
    ),
)
# The trainer's passes for log-probabilities are inside the phase ``train``; the rollout worker's own times
# (generate, reward) overlap each other and are no phases.
_INSIDE_TRAIN = ("ref_log_probs", "teacher_log_probs", "old_log_probs", "values")
_PHASES = ("rollout", *_INSIDE_TRAIN, "train", "save", "publish")


@dataclass(slots=True, kw_only=True)
class Report:
    """What the page shows. ``files``: name of a thing to its address relative to the page."""

    title: str
    metrics: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]] = ()
    facts: RunFacts = field(default_factory=RunFacts)
    files: Mapping[str, str] = field(default_factory=dict)
    spans: Spans = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Figure:
    """A picture with its heading. picture: SVG; names: the legend, colours by name."""

    heading: str
    picture: str
    names: Mapping[str, int] = field(default_factory=dict)
    wide: bool = False


@dataclass(slots=True, kw_only=True)
class _Phase:
    """One row of the table of times."""

    name: str
    share: float
    figures: Sequence[str]


def write_report(run_dir: str | Path, output: str | Path | None = None, title: str = "") -> Path:
    """Write the report of the run in ``run_dir`` to ``output``, or to ``report.html`` there; returns its path.

    Raises DataError if the run has no metrics or a line of its files is damaged, ConfigError if the page cannot be
    written.
    """
    folder = Path(run_dir)
    target = folder / REPORT_FILE if output is None else Path(output)
    samples = folder / SAMPLES_FILE
    page = render_report(
        Report(
            title=title or folder.absolute().name,
            metrics=read_metrics(folder),
            samples=read_jsonl(samples) if samples.exists() else [],
            facts=read_facts(folder),
            spans=read_trace(folder),
            files={name: _address(path, target) for name, path in run_files(folder).items() if path != target},
        )
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_text(page, encoding="utf-8", errors="replace")  # a lone surrogate of a response is no UTF-8
        temporary.replace(target)
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}", where=str(target)) from error
    return target


def run_report(run_dir: str | Path, console: Console | None = None, title: str = "Learning curve") -> list[EvalGain]:
    """Print what the run in ``run_dir`` learned and where its files are, draw its picture and write its page.

    Returns the gains that the table shows. Raises DataError if the run has no metrics.
    """
    out = console or Console()
    records = read_metrics(run_dir)
    gains = eval_gains(records)
    write_curve(run_dir, title)
    write_report(run_dir)
    out.print()
    if gains:
        out.print(gain_table(gains))
    else:
        out.print("This run evaluated nothing: give it --eval-prompt-data NAME=PATH.", markup=False)
    rewards = curves_of(records).reward.values
    if rewards:
        line = f"training reward  {rewards[0]:.3f}  {sparkline(rewards)}  {rewards[-1]:.3f}"
        out.print(Text(line), highlight=False)
    seconds = sum(record.get("perf/step_time") or 0.0 for record in records)
    if seconds:
        out.print(Text(f"training steps took {format_duration(seconds)} together"), highlight=False)
    if start := read_facts(run_dir).start:
        out.print(Text(printable(f"start: {text_of(start)}")), highlight=False, soft_wrap=True)
    files = run_files(run_dir)
    width = max(map(len, files), default=0)
    for name, path in files.items():
        out.print(Text(printable(f"{name:<{width}}  {path}")), highlight=False, soft_wrap=True)
    return gains


def render_report(report: Report) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"json": lambda value: json.dumps(value, ensure_ascii=False), "seconds": format_seconds}
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    steps = steps_of(report.metrics)
    phases, phase_charts = _timing(steps)
    samples = [_sample_row(record) for record in chosen_samples(report.samples)]
    return environment.get_template("report.html").render(
        report=report,
        # The browser loads nothing and runs no script but this one, whatever a response holds.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'",
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=script,
        facts=_facts(report, steps),
        gains=eval_gains(report.metrics),
        curves=_curves(report.metrics, steps),
        phases=phases,
        phase_charts=phase_charts,
        timeline=_timeline(report.spans),
        advice=advice(report.spans),
        drops=_drops(steps),
        samples=samples,
        sample_kinds={kind: kind for kind in sorted({row["kind"] for row in samples})},
        sample_steps={step: f"step {step}" for step in sorted({row["step"] for row in samples})},
    )


def steps_of(records: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """The metrics of each training step, ascending; evaluations are left out, and so are null values.

    Where a step occurs twice (after a resume) the later line counts.
    """
    steps: dict[int, dict[str, float]] = {}
    for record in records:
        if record.get("kind") != "eval":
            numbers = {name: value for name, value in record.items() if "/" in name and value is not None}
            steps.setdefault(int(record["step"]), {}).update(numbers)
    return dict(sorted(steps.items()))


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase of one step; together they are the step. ``other`` is what no phase was measured for."""
    times = {name: float(metrics.get(f"perf/{name}_time", 0.0)) for name in _PHASES}
    times["train"] = max(0.0, times["train"] - sum(times[name] for name in _INSIDE_TRAIN))
    times["other"] = max(0.0, float(metrics.get("perf/step_time", 0.0)) - sum(times.values()))
    return times


def chosen_samples(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most ``MAX_STEPS`` rollouts of each kind, and of each the first ``MAX_PER_STEP`` samples, newest first."""
    by_kind: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for record in records:
        step = int(record.get("rollout_id") or 0)
        by_kind.setdefault(str(record.get("kind", "")), {}).setdefault(step, []).append(record)
    chosen = [
        (step, kind, sample)
        for kind, rollouts in by_kind.items()
        for step in spread(sorted(rollouts), MAX_STEPS)
        for sample in rollouts[step][:MAX_PER_STEP]
    ]
    return [sample for _, _, sample in sorted(chosen, key=lambda entry: (-entry[0], entry[1]))]


def spread(values: Sequence[int], count: int) -> list[int]:
    """``count`` of the values, evenly spaced, both ends among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def plain_text(value: Any) -> str:
    """What a cell says: text as it is, chat messages one ``role: content`` a line, other values as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "role" in item for item in value):
        return "\n".join(f"{item['role']}: {plain_text(item.get('content'))}" for item in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _facts(report: Report, steps: Mapping[int, Mapping[str, float]]) -> dict[str, str]:
    seconds = sum(metrics.get("perf/step_time", 0.0) for metrics in steps.values())
    tokens = sum(m.get(f"{part}/generated_tokens", 0.0) for m in steps.values() for part in PARTS_OF_ROLLOUTS)
    return {
        "training steps": str(len(steps)),
        "they took": format_duration(seconds) if seconds else "",
        "tokens sampled": format_number(tokens) if tokens else "",
        "started": report.facts.started.replace("T", " ").replace("+00:00", " UTC"),
        "start": text_of(report.facts.start),
        "model": str(report.facts.changed.get("--hf-checkpoint", "")),
        "buffer_rl": report.facts.version,
    }


def _curves(records: Sequence[Mapping[str, Any]], steps: Mapping[int, Mapping[str, float]]) -> list[_Figure]:
    figures = [_learning_curve(records)]
    for heading, names in _CHARTS:
        lines = [
            Line(name=name, points=[(step, m[metric]) for step, m in steps.items() if metric in m], colour=number + 1)
            for number, (name, metric) in enumerate(names.items())
        ]
        lines = [line for line in lines if line.points]
        chart = line_chart(lines, label=f"{heading} over training steps")
        legend = {line.name: line.colour for line in lines if len(lines) > 1}
        figures.append(_Figure(heading=heading, picture=chart, names=legend))
    return [figure for figure in figures if figure.picture]


def _learning_curve(records: Sequence[Mapping[str, Any]]) -> _Figure:
    curves = curves_of(records)
    lines, names = [], {}
    for title, series, colour in ((REWARD_NAME, curves.reward, 0), (ALL_NAME, curves.all_rewards, COLOURS - 1)):
        if not series.steps:
            continue
        smooth = moving_mean(series.values, _SMOOTHING_STEPS)
        window = min(_SMOOTHING_STEPS, len(smooth))
        name = f"{title} (mean of {window} steps)" if window > 1 else title
        names[name] = colour
        points = list(zip(series.steps, series.values, strict=True))
        lines.append(Line(name=title, points=points, colour=colour, faint=True))
        points = list(zip(series.steps, smooth, strict=True))
        lines.append(Line(name=name, points=points, colour=colour, dashed=title == ALL_NAME))
    for number, (name, series) in enumerate(curves.evals.items(), start=1):
        names[f"evaluation: {name}"] = number % COLOURS
        points = list(zip(series.steps, series.values, strict=True))
        lines.append(Line(name=name, points=points, colour=number, marked=True))
    chart = line_chart(lines, label="Mean reward over training steps", width=1000, height=280, unit_range=True)
    return _Figure(heading="Mean reward", picture=chart, names=names, wide=True)


def _timing(steps: Mapping[int, Mapping[str, float]]) -> tuple[list[_Phase], list[_Figure]]:
    """The rows of the table, and the two charts; none where no step was timed."""
    timed = {step: phase_seconds(metrics) for step, metrics in steps.items() if "perf/step_time" in metrics}
    names = [name for name in (*_PHASES, "other") if any(times[name] > 0 for times in timed.values())]
    if not names:
        return [], []
    layers = {name: [times[name] for times in timed.values()] for name in names}
    total = sum(sum(seconds) for seconds in layers.values())
    phases = []
    for name, seconds in layers.items():
        share = sum(seconds) / total
        figures = (f"{median(seconds):.3f} s", f"{max(seconds):.3f} s", format_duration(sum(seconds)), f"{share:.1%}")
        phases.append(_Phase(name=name, share=share, figures=figures))
    shares = stacked_bars(list(timed), layers, label="Share of each phase over training steps", share=True)
    lengths = stacked_bars(list(timed), layers, label="Seconds of each phase over training steps")
    return phases, [
        _Figure(heading="Share of a step", picture=shares),
        _Figure(heading="Seconds of a step", picture=lengths),
    ]


def _timeline(spans: Spans) -> list[tuple[_Figure, StepStats]]:
    """The first step, the one of median length, and the last; empty without a step."""
    kind, shown = overlap_of(spans), []
    windows = step_windows(spans, kind)
    if not windows:
        return []
    for rollout_id, which in chosen_steps(windows).items():
        stats = step_stats(spans, rollout_id, windows[rollout_id], kind)
        members = spans_within(spans, stats.start, stats.end)
        name = f"Step {rollout_id} ({which})" if which else f"Step {rollout_id}"
        picture, names = step_picture(members, stats), names_shown(members)
        shown.append((_Figure(heading=f"{name}: {headline(stats)}", picture=picture, names=names, wide=True), stats))
    return shown


def _drops(steps: Mapping[int, Mapping[str, float]]) -> _Figure | None:
    drops = [drops_of(metrics) for metrics in steps.values()]
    reasons = Counter[str]()
    for of_step in drops:
        reasons.update(of_step)
    if not reasons:
        return None
    ordered = [reason for reason, _ in reasons.most_common()]
    layers = {reason: [float(of_step.get(reason, 0)) for of_step in drops] for reason in ordered[: COLOURS - 1]}
    if rest := ordered[COLOURS - 1 :]:
        layers["other reasons"] = [float(sum(of_step.get(reason, 0) for reason in rest)) for of_step in drops]
    chart = stacked_bars(list(steps), layers, label="Dropped groups over training steps", width=1000, height=200)
    totals = {f"{name}: {format_number(sum(counts))}": number for number, (name, counts) in enumerate(layers.items())}
    return _Figure(heading="Groups a step, by reason", picture=chart, names=totals, wide=True)


def _sample_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the table and its filter show of a sample. sign: of the reward, empty where that is no number."""
    reward = record.get("reward")
    number = float(reward) if isinstance(reward, int | float) and not isinstance(reward, bool) else None
    kind = str(record.get("kind", ""))
    return {
        "step": int(record.get("rollout_id") or 0),
        "kind": kind,
        "shown_kind": f"{kind}: {record['data_set']}" if record.get("data_set") else kind,
        "texts": [_cell(record.get(name)) for name in ("prompt", "response", "label")],
        "reward": _cell(reward) if number is None else f"{number:.4g}",
        "sign": "" if number is None else "+" if number > 0 else "-" if number < 0 else "0",
        "status": _cell(record.get("status")),
    }


def _cell(value: Any) -> str:
    text = plain_text(value)
    more = len(text) - MAX_CHARACTERS
    return text[:MAX_CHARACTERS] + (f" … {more} more characters" if more > 0 else "")


def _address(path: Path, page: Path) -> str:
    relative = os.path.relpath(path.absolute(), page.absolute().parent)
    return quote(relative.replace(os.sep, "/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalGain:
    """Mean reward on one evaluation set at the first and the last evaluation of a run."""

    name: str
    first_step: int
    before: float
    last_step: int
    after: float

    @property
    def gain(self) -> float:
        """``after - before``."""
        return self.after - self.before

    @property
    def shown_gain(self) -> str:
        """The gain with its sign, three digits and no negative zero."""
        return f"{round(self.gain, 3) + 0.0:+.3f}"


def eval_gains(records: Iterable[Mapping[str, Any]]) -> list[EvalGain]:
    """First against last evaluation, one entry an evaluation set that was evaluated, in the order first seen."""
    return [
        EvalGain(
            name=name,
            first_step=series.steps[0],
            before=series.values[0],
            last_step=series.steps[-1],
            after=series.values[-1],
        )
        for name, series in curves_of(records).evals.items()
    ]


def gain_table(gains: Iterable[EvalGain], title: str = "Mean reward on evaluation prompts") -> Table:
    """The table: a row an evaluation set."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("evaluation set")
    for heading in ("before", "after", "gain", "steps"):
        table.add_column(heading, justify="right")
    for gain in gains:
        if gain.first_step == gain.last_step:  # evaluated once: there is nothing to compare with
            table.add_row(Text(printable(gain.name)), "-", f"{gain.after:.3f}", "-", str(gain.last_step))
            continue
        style = "green" if gain.gain > 0 else "red" if gain.gain < 0 else ""
        steps = f"{gain.first_step} → {gain.last_step}"
        change = Text(gain.shown_gain, style=style)
        table.add_row(Text(printable(gain.name)), f"{gain.before:.3f}", f"{gain.after:.3f}", change, steps)
    return table


def run_files(run_dir: str | Path) -> dict[str, Path]:
    """What a run left behind that exists: name of the thing to its path."""
    folder = Path(run_dir)
    candidates = {
        "report": folder / REPORT_FILE,
        "picture": folder / CURVE_FILE,
        "metrics": folder / METRICS_FILE,
        "samples": folder / SAMPLES_FILE,
        "trace (ui.perfetto.dev)": folder / TRACE_FILE,
        "TensorBoard": folder / "tensorboard",
        "model (Hugging Face)": folder / "hf",
        "checkpoints": Path(local_path(str(read_facts(folder).changed.get("--save", folder / "checkpoints")))),
        "quarantined prompts": folder / "quarantine.jsonl",
        "rows of bad steps": folder / "non_finite",
        "logs": folder / "logs",
    }
    return {name: path for name, path in candidates.items() if path.exists()}
