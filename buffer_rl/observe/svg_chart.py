"""Line charts, stacked bars, and the picture of a step with one lane for each role, as inline SVG: plain text from
numbers, coloured by the classes of the page's style.

Colours are the classes ``c0`` to ``c13``, so that one picture serves a light and a dark page. A phase or a role has
the same one in every picture of every run (``PHASE_COLOURS``); curves take the first eight in turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path

from buffer_rl.observe.curve import edges, neighbour_means
from buffer_rl.observe.timeline import WorkSpan, in_order
from buffer_rl.observe.timeline_stats import PHASES_OF_OTHERS, Spans, StepStats
from buffer_rl.plan.roles import CRITIC, DEDICATED, ROLES

TEMPLATES = Path(__file__).with_name("templates")
COLOURS = 8
NARROW = 240
"""Height in pixels of the picture that a narrow page shows in place of a wide one, as wide as a small chart."""
MAX_POINTS = 400  # points of a line, and bars of a stack; more are averaged, so that a long run's page stays small
MAX_BARS = 80
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 24
_TICKS = 5


Points = Sequence[tuple[float, float]]
"""Step and value of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve. colour: index of a class; marked: a dot at each point; faint: a thin line behind another one; dashed:
    so that it differs from a solid line beside it not by its colour alone."""

    name: str
    points: Points
    colour: int = 0
    marked: bool = False
    faint: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where data coordinates are on the picture."""

    width: int
    height: int
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)


def line_chart(
    lines: Sequence[Line], *, label: str, width: int = 460, height: int = 200, unit_range: bool = False
) -> str:
    """The lines over training steps. unit_range: the axis is 0 to 1 where all values are inside it.

    An empty text where there is no point.
    """
    lines = [thinned(line) for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    low, high = (0.0, 1.0) if unit_range and min(ys) >= 0 and max(ys) <= 1 else _padded(min(ys), max(ys))
    frame = _Frame(width=width, height=height, x_low=min(xs), x_high=max(max(xs), min(xs) + 1), y_low=low, y_high=high)
    parts = [_axes(frame)]
    for line in lines:
        points = [(frame.x(x), frame.y(y)) for x, y in line.points]
        kind = f"line c{line.colour % COLOURS}" + (" faint" if line.faint else "")
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        if len(points) > 1:
            corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="{kind}"{dashes} points="{corners}"/>')
        if line.marked or len(points) == 1:
            parts += [
                f'<circle class="dot c{line.colour % COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
                f"<title>{escape(line.name)}, step {step:g}: {format_number(value)}</title></circle>"
                for (x, y), (step, value) in zip(points, line.points, strict=True)
            ]
    return _svg(width, height, label, parts)


def stacked_bars(
    steps: Sequence[int],
    stacks: Mapping[str, Sequence[float]],
    *,
    label: str,
    share: bool = False,
    colours: Mapping[str, int] | None = None,
    width: int = 460,
    height: int = 200,
) -> str:
    """A bar a step (or a few steps, then their mean), one layer for each entry of ``stacks`` (``[num_steps]``).

    share: each bar is scaled to 1. colours: of the layers by name; in turn if None. An empty text if every value is 0.
    """
    if not any(value > 0 for layer in stacks.values() for value in layer):
        return ""
    bars = [list(bar) for bar in zip(*(neighbour_means(layer, MAX_BARS) for layer in stacks.values()), strict=True)]
    if share:
        bars = [[value / (sum(bar) or 1.0) for value in bar] for bar in bars]
    top = 1.0 if share else max(sum(bar) for bar in bars)
    first, last = steps[0], steps[-1]
    frame = _Frame(width=width, height=height, x_low=first - 0.5, x_high=last + 0.5, y_low=0.0, y_high=top)
    parts = [_axes(frame, percent=share)]
    for bar, (start, end) in zip(bars, pairwise(edges(len(steps), MAX_BARS)), strict=True):
        left, right = frame.x(steps[start] - 0.5), frame.x(steps[end - 1] + 0.5)
        span = f"step {steps[start]}" + (f" to {steps[end - 1]}" if end - start > 1 else "")
        base = 0.0
        for number, (name, value) in enumerate(zip(stacks, bar, strict=True)):
            if value > 0:
                colour = number % COLOURS if colours is None else colours[name]
                shown = f"{value:.0%}" if share else format_number(value)
                upper, lower = frame.y(base + value), frame.y(base)
                parts.append(_bar(colour, left, upper, right - left, lower - upper, f"{name}, {span}: {shown}"))
            base += value
    return _svg(width, height, label, parts)


def picture_file(parts: Sequence[str], *, label: str, width: int, height: int) -> str:
    """A file of its own, of SVG elements that use the classes of this module, and ``heading`` for a bold text.

    It has the colours of the report's style, light and dark, and its rules for what is inside a picture."""
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    rules = [line for line in style.splitlines() if line.startswith(("svg text{", "svg ."))]
    rules.append("svg .heading{fill:var(--fg);font-weight:600;font-size:13px}.page{fill:var(--bg)}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}">\n'
        f"<style>\n{style[style.index(':root') : style.index('*{box-sizing')]}" + "\n".join(rules) + "</style>\n"
        f'<rect class="page" width="{width}" height="{height}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def thinned(line: Line) -> Line:
    """The line with at most ``MAX_POINTS`` points, each the mean of its neighbours."""
    xs, ys = (neighbour_means(values, MAX_POINTS) for values in zip(*line.points, strict=True))
    return replace(line, points=list(zip(xs, ys, strict=True)))


def ticks(low: float, high: float, count: int = _TICKS) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``: multiples of 1, 2, 2.5 or 5 times a power of ten."""
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) + 0.0 for number in range(first, last + 1)]


def format_number(value: float) -> str:
    """At most four significant digits; thousands as k, millions as M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if suffix == 'k' else size):.4g}{suffix}"
    return f"{value:.4g}"


def _padded(low: float, high: float) -> tuple[float, float]:
    if low == high:
        reach = abs(low) * 0.1 or 1.0
        return low - reach, high + reach
    room = (high - low) * 0.06
    return (low if low == 0 else low - room), high + room


def _axes(frame: _Frame, *, percent: bool = False) -> str:
    right, bottom = frame.width - _RIGHT, frame.height - _BOTTOM
    parts = []
    for value in ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        shown = f"{value:.0%}" if percent else format_number(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{shown}</text>')
    for value in ticks(frame.x_low, frame.x_high, 6):
        if value == int(value):  # steps are whole
            x = frame.x(value)
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{format_number(value)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return "".join(parts)


def _bar(colour: int, x: float, y: float, width: float, height: float, title: str) -> str:
    """A bar with a gap behind it. x, y: its upper left corner in pixels."""
    size = f'width="{max(width - 0.6, 0.6):.1f}" height="{height:.1f}"'
    return f'<rect class="bar c{colour}" x="{x:.1f}" y="{y:.1f}" {size}><title>{escape(title)}</title></rect>'


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width} {height}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


WIDTH = 1000
_STEP_LEFT, _STEP_RIGHT, _STEP_TOP, _STEP_BOTTOM = 108, 84, 4, 22
_LANE, _GAP = 22, 8
# Label and colour of each kind of work; that of no role's stream comes last.
_WORK = {name: (role.title, role.colour) for name, role in ROLES.items()} | {
    "train_log_probs": ("log-probabilities by the trainer", 2),
    "values": ("values by the critic", ROLES[CRITIC].colour),
    "update": ("update", 3),
    "evaluate": ("evaluation", 10),
    "pause": ("engines paused", 12),
}
_OTHER = 13  # work of roles that the user adds, and time that no phase was measured for
PHASE_COLOURS = {
    "rollout": ROLES["rollout"].colour,
    **{role.fields[0]: role.colour for role in ROLES.values() if role.model and role.fields},
    "train": _WORK["update"][1],
    "save": ROLES["save"].colour,
    "publish": ROLES["publish"].colour,
    "other": _OTHER,
}
"""The colour of each phase of a step: that of the same work on the timeline."""
_SAME = {role.fields[0]: name for name, role in DEDICATED.items() if role.model}


def headline(stats: StepStats) -> str:
    """One line: how long it took, the overlap that it reached, and how many times its bound it took."""
    parts = [f"{format_seconds(stats.wall)}, {stats.kind}"]
    if stats.overlap_share is not None:
        overlap = f"{format_seconds(stats.overlapped)} of {format_seconds(stats.streamed)}"
        parts.append(f"overlap {overlap} ({stats.overlap_share:.0%})")
    if stats.wall_to_bound is not None:
        parts.append(f"{stats.wall_to_bound:.2f}× the minimum")
    return " · ".join(parts)


def names_shown(spans: Spans) -> dict[str, int]:
    """The legend: what each colour in the picture means."""
    kinds = {_kind(span) for members in spans.values() for span in members}
    known = sorted((kind for kind in _WORK if kind in kinds), key=_colour)
    return dict(_WORK.get(kind, (kind, _OTHER)) for kind in [*known, *sorted(kinds - set(known))])


def step_picture(spans: Spans, stats: StepStats) -> str:
    """The lanes of one step as an SVG picture."""
    parts, height = step_lanes(spans, stats, stats.wall)
    return _svg(WIDTH, height, f"Timeline of step {stats.rollout_id}", parts)


def step_lanes(spans: Spans, stats: StepStats, seconds: float) -> tuple[list[str], int]:
    """The elements of a picture of one step, and its height in pixels; ``WIDTH`` pixels wide.

    spans: of the step, by role. seconds: what the time axis ends with, at least the step's length."""
    roles = in_order(role for role in spans if spans[role])
    bottom = _STEP_TOP + len(roles) * (_LANE + _GAP)
    scale = (WIDTH - _STEP_LEFT - _STEP_RIGHT) / (seconds or 1.0)
    parts = []
    for value in ticks(0.0, seconds or 1.0, 7):
        x = _STEP_LEFT + value * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_STEP_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g} s</text>')
    for number, role in enumerate(roles):
        top = _STEP_TOP + number * (_LANE + _GAP)
        parts.append(f'<text x="{_STEP_LEFT - 8}" y="{top + _LANE / 2 + 4:g}" text-anchor="end">{escape(role)}</text>')
        parts += _lane(spans[role], stats, top, scale)
        if role not in PHASES_OF_OTHERS:
            x = WIDTH - _STEP_RIGHT + 8
            parts.append(f'<text x="{x}" y="{top + _LANE / 2 + 4:g}">idle {stats.idle.get(role, 1.0):.0%}</text>')
    parts.append(f'<line class="axis" x1="{_STEP_LEFT}" x2="{WIDTH - _STEP_RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    return parts, bottom + _STEP_BOTTOM


def format_seconds(seconds: float) -> str:
    """Three significant digits; below a second in milliseconds."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds > 0 else "0 s"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s" if seconds < 1000 else f"{seconds:.0f} s"


def _lane(members: Sequence[WorkSpan], stats: StepStats, top: float, scale: float) -> list[str]:
    """The bars of one role; spans at the same time are drawn below each other."""
    rows = _rows(members)
    height = _LANE / max(len(rows), 1)
    parts = []
    for number, row in enumerate(rows):
        for first, last, count in _joined(row, 0.6 / scale if len(members) > MAX_POINTS else 0.0):
            start, end = max(first.start, stats.start), min(last.end, stats.end)
            rows_text = f", {first.num_rows} rows" if first.num_rows and count == 1 else ""
            times = f"{format_seconds(end - start)} from {format_seconds(start - stats.start)}"
            name = f"{first.name} ({count} times)" if count > 1 else first.name
            title = f"{name}, rollout {first.rollout_id}{rows_text}: {times}"
            left, width = _STEP_LEFT + (start - stats.start) * scale, (end - start) * scale
            bar_height = height - (len(rows) > 1)
            parts.append(_bar(_colour(_kind(first)), left, top + number * height, width, bar_height, title))
    return parts


def _rows(members: Iterable[WorkSpan]) -> list[list[WorkSpan]]:
    rows: list[list[WorkSpan]] = []
    for span in sorted(members, key=lambda span: span.start):
        row = next((row for row in rows if row[-1].end <= span.start + 1e-6), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return rows


def _joined(row: Sequence[WorkSpan], gap: float) -> list[tuple[WorkSpan, WorkSpan, int]]:
    """First, last and number of neighbours that are drawn as one: alike, and nearer to each other than ``gap``."""
    joined: list[tuple[WorkSpan, WorkSpan, int]] = []
    for span in row:
        if joined and gap:
            first, last, count = joined[-1]
            if (span.name, span.rollout_id) == (last.name, last.rollout_id) and span.start - last.end < gap:
                joined[-1] = (first, span, count + 1)
                continue
        joined.append((span, span, 1))
    return joined


def _kind(span: WorkSpan) -> str:
    return _SAME.get(span.name, span.name)


def _colour(kind: str) -> int:
    return _WORK.get(kind, (kind, _OTHER))[1]
