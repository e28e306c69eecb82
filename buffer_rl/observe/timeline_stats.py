"""Statistics of a step from its spans: idle roles, waits between roles, overlap, and the lower bound of its time.

A step is what happens from the start of its rollout to the start of the next one; evaluations are no part of it. Its
streamed work is what roles do with single groups once they are finished: reference and old log-probabilities,
advantages and, with streamed gradients, forward and backward. Its bound is what the step cannot take less than:

    lockstep            T_gen + streamed work + T_update + T_publish + T_save
    pipelined,
    streamed gradients  max(T_gen, streamed work - tail) + tail + T_update + T_publish + T_save

T_update is forward, backward and the optimizer, with streamed gradients the optimizer alone. The tail is the work on
the last groups that is left when generation has ended. Roles work beside each other, so the longest of them counts in
the maximum, and in lockstep the time in which any of them worked. Only what lies within the step counts, and of update,
publication and saving only what nothing else ran beside, so that no step takes less than its bound.

The picture of a step has one lane for each role, as inline SVG in the colours of the page's style.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from itertools import pairwise

from buffer_rl.observe.svg_chart import MAX_POINTS, ticks
from buffer_rl.observe.timeline import WorkSpan, in_order
from buffer_rl.plan.roles import DEDICATED, ROLES

Spans = Mapping[str, Sequence[WorkSpan]]
Interval = tuple[float, float]
NO_ROLE = "no role"
PHASES_OF_OTHERS = ("publish", "save")
"""Rows of the timeline that are no roles with processes of their own, so that nothing is idle in them."""
WIDTH = 1000
_LEFT, _RIGHT, _TOP, _BOTTOM = 108, 84, 4, 22
_LANE, _GAP = 22, 8
# Work that is none of a role's stream: its label and colour.
_OTHER_WORK = {
    "train_log_probs": ("log-probabilities by the trainer", 2),
    "values": ("values by the critic", 2),
    "update": ("update", 3),
}
_LABELS = {name: role.title for name, role in ROLES.items()} | {kind: work[0] for kind, work in _OTHER_WORK.items()}
_COLOURS = {name: role.colour for name, role in ROLES.items()} | {kind: work[1] for kind, work in _OTHER_WORK.items()}
_SAME = {role.fields[0]: name for name, role in DEDICATED.items() if role.model}


class Overlap(StrEnum):
    """The work of a step that may overlap its rollout."""

    LOCKSTEP = "lockstep"
    PIPELINED = "pipelined"
    STREAMED_GRADIENTS = "pipelined, streamed gradients"

    @classmethod
    def of_options(cls, schedule: str, stream_gradients: bool) -> Overlap:
        """What ``--schedule`` and ``--stream-gradients`` let overlap."""
        if stream_gradients:
            return cls.STREAMED_GRADIENTS
        return cls.LOCKSTEP if schedule == "lockstep" else cls.PIPELINED


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step. All times in seconds; ``start`` and ``end`` on the clock of the spans.

    busy: by role, the time in which it worked, on this rollout or another one. idle: by role, the share of the step in
    which it did not. waits: by role, for how long another one worked while it was idle (``no role``: none did).
    streamed: the sum of the streamed work; overlapped: how much of it lay inside generation.
    """

    rollout_id: int
    start: float
    end: float
    kind: Overlap
    generation: float
    streamed: float
    overlapped: float
    tail: float
    bound: float
    busy: Mapping[str, float]
    idle: Mapping[str, float]
    waits: Mapping[str, Mapping[str, float]]

    @property
    def wall(self) -> float:
        """How long the step took."""
        return self.end - self.start

    @property
    def overlap_share(self) -> float | None:
        """Share of the streamed work that lay inside generation; None where there is none."""
        return self.overlapped / self.streamed if self.streamed > 0 else None

    @property
    def wall_to_bound(self) -> float | None:
        """1 where the step took no longer than its bound, and never less; None where nothing took any time."""
        return self.wall / self.bound if self.bound > 0 else None


def step_windows(spans: Spans) -> dict[int, Interval]:
    """Start and end of every step, by rollout id, ascending in time. The end is the start of the next rollout or
    evaluation, and that of its last work where there is none yet."""
    of_rollout = [span for span in spans.get("rollout", ()) if span.name == "rollout"]
    starts = sorted(span.start for span in spans.get("rollout", ()))
    last_end: dict[int, float] = {}
    for members in spans.values():
        for span in members:
            last_end[span.step] = max(last_end.get(span.step, span.end), span.end)
    windows = {}
    for span in sorted(of_rollout, key=lambda span: span.start):
        after = bisect_right(starts, span.start)
        windows[span.rollout_id] = (span.start, starts[after] if after < len(starts) else last_end[span.rollout_id])
    return windows


def overlap_of(spans: Spans) -> Overlap:
    """The schedule as the spans show it: more than one step's, for a short rollout may end before any work starts."""
    if any(span.name == "train" for span in spans.get("train", ())):
        return Overlap.STREAMED_GRADIENTS
    ends = {span.rollout_id: span.end for span in spans.get("rollout", ()) if span.name == "rollout"}
    early = (
        span.name == "train_log_probs" or (_is_streamed(role, span) and span.start < ends.get(span.step, span.start))
        for role, members in spans.items()
        for span in members
    )
    return Overlap.PIPELINED if any(early) else Overlap.LOCKSTEP


def step_stats(spans: Spans, rollout_id: int, window: Interval | None = None, kind: Overlap | None = None) -> StepStats:
    """The statistics of one step. Raises KeyError if there is no such rollout.

    window: as ``step_windows`` has it. kind: the schedule; as ``overlap_of`` sees it where None."""
    start, end = window or step_windows(spans)[rollout_id]
    shown = spans_within(spans, start, end)
    own = {role: [span for span in shown[role] if span.step == rollout_id] for role in shown}
    generation = merged(_clipped(own.get("rollout", ()), start, end))
    worked = {role: [span for span in own[role] if _is_streamed(role, span)] for role in own}
    streamed = {role: _clipped(worked[role], start, end) for role in worked}
    parts = [part for role in streamed for part in streamed[role]]
    kind = kind or overlap_of(spans)
    tail = _tail(worked, generation, end)
    updates = [span for span in own.get("train", ()) if span.name == "update"]
    last = merged(_clipped((*updates, *(span for role in PHASES_OF_OTHERS for span in own.get(role, ()))), start, end))
    gen_seconds = length(generation)
    early = merged([*generation, *parts])
    if kind is Overlap.LOCKSTEP:
        bound = length(early)
    else:
        bound = max([gen_seconds, *(length(merged(members)) - tail for members in streamed.values())]) + tail
    bound += length(last) - length(common(last, early))
    busy = {role: merged(_clipped(shown[role], start, end)) for role in shown}
    working = [role for role in busy if role not in PHASES_OF_OTHERS]
    return StepStats(
        rollout_id=rollout_id,
        start=start,
        end=end,
        kind=kind,
        generation=gen_seconds,
        streamed=sum(b - a for a, b in parts),
        overlapped=sum(length(common([part], generation)) for part in parts),
        tail=tail,
        bound=bound,
        busy={role: length(busy[role]) for role in busy},
        idle={role: 1.0 - length(busy[role]) / (end - start) if end > start else 0.0 for role in working},
        waits={role: _waits(role, busy, start, end) for role in working},
    )


def step_metrics(spans: Spans, rollout_id: int, kind: Overlap | None = None) -> dict[str, float]:
    """``perf/idle/{role}``, ``perf/overlap`` (share of the streamed work that lay inside generation) and
    ``perf/wall_to_bound`` of a step whose work is done; empty if its rollout is not among the spans. kind: see
    ``step_stats``."""
    window = step_windows(spans).get(rollout_id)
    if window is None:
        return {}
    stats = step_stats(spans, rollout_id, window, kind)
    metrics = {f"perf/idle/{role}": share for role, share in stats.idle.items()}
    shares = {"perf/overlap": stats.overlap_share, "perf/wall_to_bound": stats.wall_to_bound}
    return metrics | {name: share for name, share in shares.items() if share is not None}


def spans_within(spans: Spans, start: float, end: float) -> dict[str, list[WorkSpan]]:
    """The spans that a stretch of time has a part of, by role; roles without any are kept."""
    return {role: [span for span in spans[role] if span.start < end and span.end > start] for role in in_order(spans)}


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as intervals that neither touch nor overlap, ascending."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        elif end > start:
            union.append((start, end))
    return union


def length(intervals: Iterable[Interval]) -> float:
    """The sum of the intervals' lengths."""
    return sum(end - start for start, end in intervals)


def common(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """What two unions (see ``merged``) have in common."""
    pairs = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return merged((start, end) for start, end in pairs if end > start)


def _is_streamed(role: str, span: WorkSpan) -> bool:
    return role != "rollout" and role not in PHASES_OF_OTHERS and span.name != "update"


def _clipped(spans: Iterable[WorkSpan], start: float, end: float) -> list[Interval]:
    return [(max(span.start, start), min(span.end, end)) for span in spans]


def _tail(streamed: Spans, generation: Sequence[Interval], end: float) -> float:
    """The last span of each kind of work, as far as it lies after generation and before ``end``. They wait for each
    other or run side by side, so the time in which any of them worked counts."""
    last = {(role, span.name): span for role in streamed for span in sorted(streamed[role], key=lambda span: span.end)}
    ended = generation[-1][1] if generation else 0.0
    return length(merged(_clipped(last.values(), ended, end)))


def _waits(role: str, busy: Mapping[str, Sequence[Interval]], start: float, end: float) -> dict[str, float]:
    edges = sorted({start, end, *(edge for intervals in busy.values() for interval in intervals for edge in interval)})
    waits: dict[str, float] = {}
    for a, b in pairwise(edges):
        at_work = [other for other, intervals in busy.items() if _covers(intervals, (a + b) / 2)]
        if role not in at_work:
            for other in at_work or [NO_ROLE]:
                waits[other] = waits.get(other, 0.0) + b - a
    return waits


def _covers(intervals: Sequence[Interval], moment: float) -> bool:
    place = bisect_right(intervals, (moment, float("inf"))) - 1
    return place >= 0 and intervals[place][1] > moment


def chosen_steps(windows: Mapping[int, Interval]) -> dict[int, str]:
    """Up to three steps, ascending, and which they are."""
    steps = list(windows)
    by_length = sorted(steps[1:-1], key=lambda step: windows[step][1] - windows[step][0])
    if len(steps) == 1:
        return {steps[0]: ""}
    middle = {by_length[len(by_length) // 2]: "median length of those between"} if by_length else {}
    return {steps[0]: "first", **middle, steps[-1]: "last"}


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
    kinds = {_kind(span) for members in spans.values() for span in members if span.name != "evaluate"}
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
    rows = _rows(span for span in members if span.name != "evaluate")
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
