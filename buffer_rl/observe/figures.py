"""The pictures of a report: curves over training steps, times of phases, timelines of steps, dropped groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from buffer_rl.observe.curve import ALL_NAME, REWARD_NAME, SMOOTHING_STEPS, curves_of, moving_mean
from buffer_rl.observe.memory import PEAK_PREFIX
from buffer_rl.observe.metrics import PHASES, drops_of, phase_seconds
from buffer_rl.observe.progress import format_duration
from buffer_rl.observe.svg_chart import (
    COLOURS,
    NARROW,
    PHASE_COLOURS,
    Line,
    format_number,
    headline,
    line_chart,
    names_shown,
    stacked_bars,
    step_picture,
)
from buffer_rl.observe.timeline_stats import (
    Spans,
    StepStats,
    chosen_steps,
    overlap_of,
    spans_within,
    step_stats,
    step_windows,
)

CHARTS: Mapping[str, Mapping[str, str]] = {
    "Loss": {"policy": "train/loss", "critic": "critic/loss"},
    "Entropy (nats)": {"entropy": "train/entropy"},
    "Gradient norm": {"policy": "train/grad_norm", "critic": "critic/grad_norm"},
    "KL divergence (nats per token)": {
        "to the reference": "train/kl_loss",
        "to the reference, measured": "train/ref_kl",
        "to the teacher": "train/opd_reverse_kl",
        "to the policy before the step": "train/ppo_kl",
    },
    "KL coefficient": {"coefficient": "train/kl_coef"},
    "Share of clipped tokens": {
        "policy": "train/pg_clipfrac",
        "weights of CISPO": "train/cispo_clipfrac",
        "in clipped sequences": "train/sequence_clipfrac",
        "critic": "critic/value_clipfrac",
    },
    "Engine and trainer: difference (nats per token)": {"mean": "train/train_rollout_logprob_abs_diff"},
    "Engine and trainer: effective sample size (share)": {
        "sample size": "train/mismatch/ess",
        "rejected tokens": "train/mismatch/rejected",
    },
    "Critic: values and returns": {"values": "critic/values", "returns": "critic/returns"},
    "Critic: explained variance of the returns": {"explained": "critic/explained_variance"},
    "Response length (tokens)": {"mean": "rollout/response_len/mean", "longest": "rollout/response_len/max"},
    "Share of truncated responses": {"truncated": "rollout/truncated_ratio"},
    "Tokens per second": {"tokens per second": "perf/tokens_per_s"},
    "Staleness (weight versions)": {"mean": "staleness/mean", "largest": "staleness/max"},
    "Share of samples with tokens of several versions": {"mixed": "staleness/mixed"},
    "Groups left when a step was chosen": {"live": "production/live_groups", "finished": "production/finished_groups"},
}
"""Small charts by heading: the metric of each line by the line's name."""
Steps = Mapping[int, Mapping[str, float]]
"""The metrics of each training step, ascending."""


@dataclass(slots=True, kw_only=True)
class Figure:
    """A picture with its heading. picture: SVG; names: the legend, colours by name. narrow: the picture for a narrow
    page, where ``picture`` is a wide one whose text would become too small. scrolls: a narrow page shows a part."""

    heading: str
    picture: str
    names: Mapping[str, int] = field(default_factory=dict)
    wide: bool = False
    narrow: str = ""
    scrolls: bool = False


def small_charts(steps: Steps) -> list[Figure]:
    """The curves of what the run has of ``CHARTS``, and of memory."""
    figures = []
    for heading, names in {**CHARTS, "Peak memory (GB)": _memory_names(steps)}.items():
        lines = [
            Line(name=name, points=[(step, m[metric]) for step, m in steps.items() if metric in m], colour=number + 1)
            for number, (name, metric) in enumerate(names.items())
        ]
        lines = [line for line in lines if line.points]
        legend = {line.name: line.colour % COLOURS for line in lines if len(lines) > 1}
        figures.append(line_figure(heading, lines, legend))
    return [figure for figure in figures if figure.picture]


def line_figure(heading: str, lines: Sequence[Line], names: Mapping[str, int], *, wide: bool = False) -> Figure:
    """The lines over training steps. wide: as wide as the page, of values that may be shares."""
    label = f"{heading} over training steps"
    if not wide:
        return Figure(heading=heading, picture=line_chart(lines, label=label), names=names)
    return _wide_figure(heading, partial(line_chart, lines, label=label, unit_range=True), 280, names)


def _wide_figure(heading: str, draw: Callable[..., str], height: int, names: Mapping[str, int]) -> Figure:
    """What ``draw`` draws, as wide as the page, and once more for a narrow page."""
    picture, narrow = draw(width=1000, height=height), draw(height=NARROW)
    return Figure(heading=heading, picture=picture, narrow=narrow, names=names, wide=True)


def _memory_names(steps: Steps) -> dict[str, str]:
    """Metrics of peak memory by role and kind: ``perf/peak_memory/ROLE_gb`` of the host, ``ROLE_device_gb``."""
    found = sorted({name for metrics in steps.values() for name in metrics if name.startswith(PEAK_PREFIX)})
    return {name.removeprefix(PEAK_PREFIX).removesuffix("_gb").replace("_", " "): name for name in found}


def learning_curve(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Training reward and evaluations over the steps."""
    curves = curves_of(records)
    lines: list[Line] = []
    names: dict[str, int] = {}
    for title, series, colour in ((REWARD_NAME, curves.reward, 0), (ALL_NAME, curves.all_rewards, COLOURS - 1)):
        if not series.steps:
            continue
        smooth = moving_mean(series.values, SMOOTHING_STEPS)
        window = min(SMOOTHING_STEPS, len(smooth))
        name = f"{title} (mean of {window} steps)" if window > 1 else title
        names[name] = colour
        lines.append(Line(name=title, points=series.points, colour=colour, faint=True))
        points = [(float(step), value) for step, value in zip(series.steps, smooth, strict=True)]
        lines.append(Line(name=name, points=points, colour=colour, dashed=title == ALL_NAME))
    for number, (name, series) in enumerate(curves.evals.items(), start=1):
        names[f"evaluation: {name}"] = number % COLOURS
        lines.append(Line(name=name, points=series.points, colour=number, marked=True))
    return line_figure("Mean reward", lines, names, wide=True)


def phase_table(steps: Steps) -> tuple[list[dict[str, Any]], list[Figure]]:
    """The rows of the table of times, each with ``name``, ``share``, ``colour`` and ``figures``, and two charts; none
    if no step was timed."""
    timed = {step: phase_seconds(metrics) for step, metrics in steps.items() if "perf/step_time" in metrics}
    names = [name for name in (*PHASES, "other") if any(times[name] > 0 for times in timed.values())]
    if not names:
        return [], []
    layers = {name: [times[name] for times in timed.values()] for name in names}
    total = sum(sum(seconds) for seconds in layers.values())
    phases = []
    for name, seconds in layers.items():
        share = sum(seconds) / total
        figures = (f"{median(seconds):.3f} s", f"{max(seconds):.3f} s", format_duration(sum(seconds)), f"{share:.1%}")
        phases.append({"name": name, "share": share, "colour": PHASE_COLOURS[name], "figures": figures})
    draw = partial(stacked_bars, list(timed), layers, colours=PHASE_COLOURS)
    shares = draw(label="Share of each phase over training steps", share=True)
    lengths = draw(label="Seconds of each phase over training steps")
    headed = {"Share of a step": shares, "Seconds of a step": lengths}
    return phases, [Figure(heading=heading, picture=picture) for heading, picture in headed.items()]


def timeline(spans: Spans) -> list[tuple[Figure, StepStats]]:
    """The first step, the one of median length, and the last; empty without a step."""
    kind, shown = overlap_of(spans), []
    windows = step_windows(spans, kind)
    for rollout_id, which in chosen_steps(windows).items():
        stats = step_stats(spans, rollout_id, windows[rollout_id], kind)
        members = spans_within(spans, stats.start, stats.end)
        picture, names = step_picture(members, stats), names_shown(members)
        heading = f"Step {rollout_id}{f' ({which})' if which else ''}: {headline(stats)}"
        shown.append((Figure(heading=heading, picture=picture, names=names, wide=True, scrolls=True), stats))
    return shown


def drops_figure(steps: Steps) -> Figure | None:
    """Dropped groups by reason; None if no group was dropped."""
    drops = [drops_of(metrics) for metrics in steps.values()]
    if not (reasons := sum(map(Counter, drops), Counter[str]())):
        return None
    ordered = [reason for reason, _ in reasons.most_common()]
    layers = {reason: [float(of_step.get(reason, 0)) for of_step in drops] for reason in ordered[: COLOURS - 1]}
    if rest := ordered[COLOURS - 1 :]:
        layers["other reasons"] = [float(sum(of_step.get(reason, 0) for reason in rest)) for of_step in drops]
    totals = {f"{name}: {format_number(sum(counts))}": number for number, (name, counts) in enumerate(layers.items())}
    draw = partial(stacked_bars, list(steps), layers, label="Dropped groups over training steps")
    return _wide_figure("Groups in each step, by reason", draw, 200, totals)
