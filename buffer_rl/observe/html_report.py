"""The HTML report of a run: records in, one self-contained page out. It reads no file and needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import median
from typing import Any

from buffer_rl.observe.curve import ALL_NAME, REWARD_NAME, curves_of, moving_mean
from buffer_rl.observe.html_samples import chosen_samples, sample_table
from buffer_rl.observe.html_style import SCRIPT, STYLE, content_security_policy
from buffer_rl.observe.html_timeline import timeline_section
from buffer_rl.observe.metrics import DROP_PREFIX
from buffer_rl.observe.progress import format_duration
from buffer_rl.observe.run_folder import RunFacts
from buffer_rl.observe.summary import EvalGain, eval_gains
from buffer_rl.observe.svg_chart import COLOURS, Line, format_number, legend, line_chart, stacked_bars
from buffer_rl.observe.timeline_stats import Spans

_SMOOTHING_STEPS = 9
# Small charts: heading, and the metric of each line by the line's name.
_CHARTS = (
    ("Loss", {"loss": "train/loss"}),
    ("Entropy (nats)", {"entropy": "train/entropy"}),
    ("Gradient norm", {"gradient norm": "train/grad_norm"}),
    ("Response length (tokens)", {"mean": "rollout/response_len/mean", "longest": "rollout/response_len/max"}),
    ("Share of truncated responses", {"truncated": "rollout/truncated_ratio"}),
    ("Tokens per second", {"tokens per second": "perf/tokens_per_s"}),
)
# The trainer's passes for log-probabilities are inside the phase ``train``; the rollout worker's own times
# (generate, reward) overlap each other and are no phases.
_INSIDE_TRAIN = ("ref_log_probs", "old_log_probs")
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


def render_report(report: Report) -> str:
    """The page as text."""
    steps = steps_of(report.metrics)
    sections = [
        _header(report, steps),
        _evaluations(eval_gains(report.metrics)),
        _curves(report.metrics, steps),
        _timing(steps),
        timeline_section(report.spans),
        _drops(steps),
        _samples(report.samples),
        _files(report.files),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(content_security_policy())}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(section for section in sections if section)
        + f"\n<script>{SCRIPT}</script></body></html>\n"
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


def _header(report: Report, steps: Mapping[int, Mapping[str, float]]) -> str:
    seconds = sum(metrics.get("perf/step_time", 0.0) for metrics in steps.values())
    tokens = sum(metrics.get("rollout/generated_tokens", 0.0) for metrics in steps.values())
    changed = report.facts.changed
    facts = {
        "training steps": str(len(steps)),
        "they took": format_duration(seconds) if seconds else "",
        "tokens sampled": format_number(tokens) if tokens else "",
        "started": report.facts.started.replace("T", " ").replace("+00:00", " UTC"),
        "model": str(changed.get("--hf-checkpoint", "")),
        "buffer_rl": report.facts.version,
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items() if value)
    rows = "".join(
        f"<tr><td><code>{escape(flag)}</code></td>"
        f"<td><code>{escape(json.dumps(value, ensure_ascii=False))}</code></td></tr>"
        for flag, value in changed.items()
    )
    options = (
        f"<details><summary>Options that differ from their defaults: {len(changed)}</summary>"
        f'<div class="scroll"><table>{rows}</table></div></details>'
        if changed
        else ""
    )
    return f'<h1>{escape(report.title)}</h1><dl class="facts">{cells}</dl>{options}'


def _evaluations(gains: Sequence[EvalGain]) -> str:
    if not gains:
        return '<h2>Evaluation</h2><p class="note">This run evaluated nothing: see --eval-prompt-data.</p>'
    rows = []
    for gain in gains:
        once = gain.first_step == gain.last_step
        tone = "good" if gain.gain > 0 else "bad" if gain.gain < 0 else ""
        cells = (
            "-" if once else f"{gain.before:.3f}",
            f"{gain.after:.3f}",
            "-" if once else f'<span class="{tone}">{round(gain.gain, 3) + 0.0:+.3f}</span>',
            str(gain.last_step) if once else f"{gain.first_step} → {gain.last_step}",
        )
        rows.append(f"<tr><td>{escape(gain.name)}</td>" + "".join(f'<td class="num">{c}</td>' for c in cells) + "</tr>")
    heads = "".join(f'<th class="num">{name}</th>' for name in ("before", "after", "gain", "steps"))
    return (
        "<h2>Mean reward on evaluation prompts</h2>"
        f'<div class="scroll"><table><tr><th>evaluation set</th>{heads}</tr>{"".join(rows)}</table></div>'
    )


def _curves(records: Sequence[Mapping[str, Any]], steps: Mapping[int, Mapping[str, float]]) -> str:
    figures = [_learning_curve(records)]
    for heading, names in _CHARTS:
        lines = [
            Line(name=name, points=[(step, m[metric]) for step, m in steps.items() if metric in m], colour=number + 1)
            for number, (name, metric) in enumerate(names.items())
        ]
        chart = line_chart(lines, label=f"{heading} over training steps")
        figures.append(_figure(heading, chart, {line.name: line.colour for line in lines if len(lines) > 1}))
    shown = "".join(figures)
    return f'<h2>Curves over training steps</h2><div class="charts">{shown}</div>' if shown else ""


def _learning_curve(records: Sequence[Mapping[str, Any]]) -> str:
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
        names[f"evaluation: {name}"] = number
        points = list(zip(series.steps, series.values, strict=True))
        lines.append(Line(name=name, points=points, colour=number, marked=True))
    chart = line_chart(lines, label="Mean reward over training steps", width=1000, height=280, unit_range=True)
    return _figure("Mean reward", chart, names, wide=True)


def _timing(steps: Mapping[int, Mapping[str, float]]) -> str:
    timed = {step: phase_seconds(metrics) for step, metrics in steps.items() if "perf/step_time" in metrics}
    names = [name for name in (*_PHASES, "other") if any(times[name] > 0 for times in timed.values())]
    if not names:
        return ""
    total = sum(times[name] for times in timed.values() for name in names)
    rows, bar = [], []
    for number, name in enumerate(names):
        seconds = [times[name] for times in timed.values()]
        share = sum(seconds) / total
        bar.append(f'<span class="c{number}" style="width:{share:.2%}" title="{name}: {share:.1%}"></span>')
        figures = (f"{median(seconds):.3f} s", f"{max(seconds):.3f} s", format_duration(sum(seconds)), f"{share:.1%}")
        rows.append(
            f'<tr><td class="name"><span class="key c{number}"></span>{name}</td>'
            + "".join(f'<td class="num">{figure}</td>' for figure in figures)
            + "</tr>"
        )
    heads = "".join(f'<th class="num">{name}</th>' for name in ("median", "longest", "together", "share"))
    layers = {name: [times[name] for times in timed.values()] for name in names}
    shares = stacked_bars(list(timed), layers, label="Share of each phase over training steps", share=True)
    seconds_chart = stacked_bars(list(timed), layers, label="Seconds of each phase over training steps")
    return (
        f'<h2>Where the time went</h2><div class="share">{"".join(bar)}</div>'
        f'<div class="scroll"><table><tr><th>phase</th>{heads}</tr>{"".join(rows)}</table></div>'
        f'<div class="charts" style="margin-top:14px">{_figure("Share of a step", shares, {})}'
        f"{_figure('Seconds of a step', seconds_chart, {})}</div>"
    )


def _drops(steps: Mapping[int, Mapping[str, float]]) -> str:
    reasons: dict[str, float] = {}
    for metrics in steps.values():
        for name, value in metrics.items():
            if name.startswith(DROP_PREFIX):
                reasons[name] = reasons.get(name, 0.0) + value
    ordered = sorted((name for name in reasons if reasons[name] > 0), key=lambda name: -reasons[name])
    if not ordered:
        return ""
    layers = {
        name.removeprefix(DROP_PREFIX): [metrics.get(name, 0.0) for metrics in steps.values()]
        for name in ordered[: COLOURS - 1]
    }
    if rest := ordered[COLOURS - 1 :]:
        layers["other reasons"] = [sum(metrics.get(name, 0.0) for name in rest) for metrics in steps.values()]
    chart = stacked_bars(list(steps), layers, label="Dropped groups over training steps", width=1000, height=200)
    totals = {f"{name}: {format_number(sum(counts))}": number for number, (name, counts) in enumerate(layers.items())}
    figure = _figure("Groups a step, by reason", chart, totals, wide=True)
    return f'<h2>Dropped groups</h2><div class="charts">{figure}</div>'


def _samples(records: Sequence[Mapping[str, Any]]) -> str:
    chosen = chosen_samples(records)
    if not chosen:
        return ""
    note = f"{len(chosen)} of the {len(records)} samples that were written down, spread over the run, newest first."
    return f'<h2>Samples</h2><p class="note">{note}</p>{sample_table(chosen)}'


def _files(files: Mapping[str, str]) -> str:
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td><a href="{escape(address)}"><code>{escape(address)}</code></a></td></tr>'
        for name, address in files.items()
    )
    return f'<h2>Files</h2><div class="scroll"><table>{rows}</table></div>' if rows else ""


def _figure(heading: str, chart: str, names: Mapping[str, int], *, wide: bool = False) -> str:
    if not chart:
        return ""
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><h3>{escape(heading)}</h3>{legend(names) if names else ''}{chart}</figure>"
