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
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from buffer_rl.observe.timeline import WorkSpan, in_order

Spans = Mapping[str, Sequence[WorkSpan]]
Interval = tuple[float, float]
NO_ROLE = "no role"
PHASES_OF_OTHERS = ("publish", "save")
"""Rows of the timeline that are no roles with processes of their own, so that nothing is idle in them."""


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
