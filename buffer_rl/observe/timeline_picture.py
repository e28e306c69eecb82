"""The picture of a step: one lane for each role, as inline SVG in the colours of the page's style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from buffer_rl.observe.svg_chart import MAX_POINTS, ticks
from buffer_rl.observe.timeline import WorkSpan, in_order
from buffer_rl.observe.timeline_stats import PHASES_OF_OTHERS, Spans, StepStats
from buffer_rl.plan.roles import DEDICATED, ROLES

WIDTH = 1000
_LEFT, _RIGHT, _TOP, _BOTTOM = 108, 84, 4, 22
_LANE, _GAP = 22, 8
# Work that is none of a role's stream: its label and colour.
_OTHER_WORK = {
    "train_log_probs": ("log-probabilities by the trainer", 2),
    "values": ("values by the critic", 2),
    "update": ("update", 3),
    "evaluate": ("evaluation", 4),
    "pause": ("engines paused", 6),
}
_LABELS = {name: role.title for name, role in ROLES.items()} | {kind: work[0] for kind, work in _OTHER_WORK.items()}
_COLOURS = {name: role.colour for name, role in ROLES.items()} | {kind: work[1] for kind, work in _OTHER_WORK.items()}
_SAME = {role.fields[0]: name for name, role in DEDICATED.items() if role.model}


def headline(stats: StepStats) -> str:
    """One line: how long it took, the overlap that it reached and its distance from the bound."""
    parts = [f"{format_seconds(stats.wall)}, {stats.kind}"]
    if stats.overlap_share is not None:
        parts.append(
            f"overlap {format_seconds(stats.overlapped)} of {format_seconds(stats.streamed)} "
            f"({stats.overlap_share:.0%})"
        )
    if stats.wall_to_bound is not None:
        parts.append(f"wall/bound {stats.wall_to_bound:.2f}")
    return " · ".join(parts)


def names_shown(spans: Spans) -> dict[str, int]:
    """The legend: what each colour in the picture means."""
    kinds = {_kind(span) for members in spans.values() for span in members}
    known = sorted((kind for kind in _LABELS if kind in kinds), key=_colour)
    return {_LABELS.get(kind, kind): _colour(kind) for kind in [*known, *sorted(kinds - set(known))]}


def step_picture(spans: Spans, stats: StepStats) -> str:
    """The lanes of one step as an SVG picture."""
    parts, height = step_lanes(spans, stats, stats.wall)
    label = f"Timeline of step {stats.rollout_id}"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def step_lanes(spans: Spans, stats: StepStats, seconds: float) -> tuple[list[str], int]:
    """The elements of a picture of one step, and its height in pixels; ``WIDTH`` pixels wide.

    spans: of the step, by role. seconds: what the time axis ends with, at least the step's length."""
    roles = in_order(role for role in spans if spans[role])
    bottom = _TOP + len(roles) * (_LANE + _GAP)
    scale = (WIDTH - _LEFT - _RIGHT) / (seconds or 1.0)
    parts = []
    for value in ticks(0.0, seconds or 1.0, 7):
        x = _LEFT + value * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g} s</text>')
    for number, role in enumerate(roles):
        top = _TOP + number * (_LANE + _GAP)
        parts.append(f'<text x="{_LEFT - 8}" y="{top + _LANE / 2 + 4:g}" text-anchor="end">{escape(role)}</text>')
        parts += _lane(spans[role], stats, top, scale)
        if role not in PHASES_OF_OTHERS:
            x = WIDTH - _RIGHT + 8
            parts.append(f'<text x="{x}" y="{top + _LANE / 2 + 4:g}">idle {stats.idle.get(role, 1.0):.0%}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    return parts, bottom + _BOTTOM


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
            width = max((end - start) * scale - 0.6, 0.6)
            parts.append(
                f'<rect class="bar c{_colour(_kind(first))}" x="{_LEFT + (start - stats.start) * scale:.1f}"'
                f' y="{top + number * height:.1f}" width="{width:.1f}" height="{height - (len(rows) > 1):.1f}">'
                f"<title>{escape(title)}</title></rect>"
            )
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
    return _COLOURS.get(kind, 7)
