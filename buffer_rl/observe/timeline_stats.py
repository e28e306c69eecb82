"""Statistics of a step from its spans: idle roles, waits between roles, overlap, and the lower bound of its time.

A step is what happens from the start of its rollout to the start of the next one; evaluations are no part of it. In an
asynchronous run, whose tickets run across steps, it is what happens from the end of the training step before to its own
end: of its update, saving and publication. Its streamed work is what roles do with single groups once they are
finished: reference and old log-probabilities, advantages and, with streamed gradients, forward and backward. Its bound
is what the step cannot take less than:

    lockstep            T_gen + streamed work + T_update + T_publish + T_save
    pipelined,
    streamed gradients  max(T_gen, streamed work - tail) + tail + T_update + T_publish + T_save
    one-step-off        max(T_gen, streamed work + T_update + T_save) + T_publish
    async               max(T_gen, streamed work + T_update + T_save + T_publish)

T_update is forward, backward and the optimizer, with streamed gradients the optimizer alone. The tail is the work on
the last groups that is left when generation has ended. Roles work beside each other, so the longest of them counts in
the maximum, and in lockstep the time in which any of them worked. Only what lies within the step counts, and of update,
publication and saving only what nothing else ran beside, so that no step takes less than its bound. In the last two
rows T_gen is the time in which any ticket or evaluation ran, less the pauses of engines, and the update is streamed
work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, pairwise

from buffer_rl.observe.timeline import WorkSpan, in_order
from buffer_rl.plan.schedule import Mode

Spans = Mapping[str, Sequence[WorkSpan]]
Interval = tuple[float, float]
NO_ROLE = "no role"
PHASES_OF_OTHERS = ("publish", "save")
"""Rows of the timeline that are no roles with processes of their own, so that nothing is idle in them."""
BOTH_IDLE, EVEN = 0.25, 0.1
"""Idle shares of engines and trainer that one device cannot mend, and a difference that it would turn around."""


class Overlap(StrEnum):
    """The work of a step that may overlap its rollout; in the last two, also the rollouts of other steps."""

    LOCKSTEP = "lockstep"
    PIPELINED = "pipelined"
    STREAMED_GRADIENTS = "pipelined, streamed gradients"
    ONE_STEP_OFF = "one-step-off"
    ASYNC = "async"

    @classmethod
    def of_options(cls, schedule: str, stream_gradients: bool, max_staleness: int = 0) -> Overlap:
        """What ``--schedule`` and ``--stream-gradients`` let overlap. max_staleness: M of the schedule."""
        if max_staleness:
            return cls.ONE_STEP_OFF if schedule == Mode.ONE_STEP_OFF else cls.ASYNC
        if stream_gradients:
            return cls.STREAMED_GRADIENTS
        return cls.PIPELINED if schedule == Mode.PIPELINED else cls.LOCKSTEP

    @property
    def crosses_steps(self) -> bool:
        """Whether tickets run while earlier steps are trained on."""
        return self in (Overlap.ONE_STEP_OFF, Overlap.ASYNC)


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


def step_windows(spans: Spans, kind: Overlap | None = None) -> dict[int, Interval]:
    """Start and end of every step, by rollout id, ascending in time. The end is the start of the next rollout or
    evaluation, and that of its last work where there is none yet; in an asynchronous run, that of its last work. kind:
    see ``step_stats``."""
    if (kind or overlap_of(spans)).crosses_steps:
        return _training_windows(spans)
    of_rollout = [span for span in spans.get("rollout", ()) if span.name == "rollout"]
    starts = sorted(span.start for span in spans.get("rollout", ()))
    last_end = _ends(span for members in spans.values() for span in members)
    windows = {}
    for span in sorted(of_rollout, key=lambda span: span.start):
        after = bisect_right(starts, span.start)
        windows[span.rollout_id] = (span.start, starts[after] if after < len(starts) else last_end[span.rollout_id])
    return windows


def _training_windows(spans: Spans) -> dict[int, Interval]:
    """From the end of the step before to that of the step's last work, of steps with an update."""
    work = [span for role, members in spans.items() if role != "rollout" for span in members]
    updated = {span.rollout_id for span in work if span.name == "update"}
    ends = _ends(work)
    start = min((span.start for members in spans.values() for span in members), default=0.0)
    windows = {}
    for step in sorted(ends):
        if step in updated:
            windows[step] = (start, ends[step])
        start = ends[step]
    return windows


def _ends(spans: Iterable[WorkSpan]) -> dict[int, float]:
    """When the last of the spans of each step ended."""
    ends: dict[int, float] = {}
    for span in spans:
        ends[span.step] = max(ends.get(span.step, span.end), span.end)
    return ends


def spans_after(spans: Spans, step: int, kind: Overlap) -> dict[str, list[WorkSpan]]:
    """What the statistics of later steps need, once ``step`` has ended."""
    window = step_windows(spans, kind).get(step) if kind.crosses_steps else None
    if window is None:
        return {role: [span for span in spans[role] if span.step > step] for role in spans}
    return {role: [span for span in spans[role] if span.end > window[0]] for role in spans}


def overlap_of(spans: Spans) -> Overlap:
    """The schedule as the spans show it: more than one step's, for a short rollout may end before any work starts."""
    updates = {span.rollout_id: span.end for span in spans.get("train", ()) if span.name == "update"}
    tickets = [span for span in spans.get("rollout", ()) if span.name == "rollout"]
    if any(ticket.start < updates.get(ticket.rollout_id - 1, ticket.start) for ticket in tickets):
        published = merged((span.start, span.end) for span in spans.get("publish", ()))
        crossed = common(merged((ticket.start, ticket.end) for ticket in tickets), published)
        return Overlap.ASYNC if crossed else Overlap.ONE_STEP_OFF
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
    kind = kind or overlap_of(spans)
    start, end = window or step_windows(spans, kind)[rollout_id]
    shown = spans_within(spans, start, end)
    own = {role: [span for span in shown[role] if span.step == rollout_id] for role in shown}
    busy = {role: merged(_clipped(shown[role], start, end)) for role in shown}
    if kind.crosses_steps:
        generation = busy["rollout"] = _generation(shown, start, end)
        parts, tail, bound = _across_steps(own, generation, (start, end), kind)
    else:
        generation = merged(_clipped(own.get("rollout", ()), start, end))
        parts, tail, bound = _within_step(own, generation, (start, end), kind)
    working = [role for role in busy if role not in PHASES_OF_OTHERS]
    return StepStats(
        rollout_id=rollout_id,
        start=start,
        end=end,
        kind=kind,
        generation=length(generation),
        streamed=sum(b - a for a, b in parts),
        overlapped=sum(length(common([part], generation)) for part in parts),
        tail=tail,
        bound=bound,
        busy={role: length(busy[role]) for role in busy},
        idle={role: 1.0 - length(busy[role]) / (end - start) if end > start else 0.0 for role in working},
        waits={role: _waits(role, busy, start, end) for role in working},
    )


def _within_step(
    own: Spans, generation: list[Interval], window: Interval, kind: Overlap
) -> tuple[list[Interval], float, float]:
    """The streamed work of a step, its tail, and the bound. own: the step's spans."""
    start, end = window
    worked = {role: [span for span in own[role] if _is_streamed(role, span)] for role in own}
    streamed = {role: _clipped(worked[role], start, end) for role in worked}
    parts = [part for role in streamed for part in streamed[role]]
    tail = _tail(worked, generation, end)
    updates = [span for span in own.get("train", ()) if span.name == "update"]
    last = merged(_clipped((*updates, *(span for role in PHASES_OF_OTHERS for span in own.get(role, ()))), start, end))
    early = merged([*generation, *parts])
    if kind is Overlap.LOCKSTEP:
        bound = length(early)
    else:
        bound = max([length(generation), *(length(merged(members)) - tail for members in streamed.values())]) + tail
    return parts, tail, bound + length(last) - length(common(last, early))


def _across_steps(
    own: Spans, generation: list[Interval], window: Interval, kind: Overlap
) -> tuple[list[Interval], float, float]:
    """As ``_within_step``, of a step of an asynchronous run, which has no tail."""
    start, end = window
    work = [(role, span) for role in own if role != "rollout" for span in own[role]]
    parts = _clipped((span for role, span in work if role not in PHASES_OF_OTHERS), start, end)
    sending = merged(_clipped(own.get("publish", ()), start, end))
    training = merged([*parts, *_clipped(own.get("save", ()), start, end)])
    if kind is Overlap.ONE_STEP_OFF:
        bound = max(length(generation), length(training))
        bound += length(sending) - length(common(sending, merged([*generation, *training])))
    else:
        bound = max(length(generation), length(merged([*training, *sending])))
    return parts, 0.0, bound


def _generation(spans: Spans, start: float, end: float) -> list[Interval]:
    """When engines had tickets or an evaluation to work on, and were not paused."""
    pauses = merged(_clipped((span for span in spans.get("publish", ()) if span.name == "pause"), start, end))
    return without(merged(_clipped(spans.get("rollout", ()), start, end)), pauses)


def advice(spans: Spans, kind: Overlap | None = None) -> str:
    """Which side of an asynchronous run waits for the other, and what to change; empty for other runs, and for fewer
    than three steps. The first step is left out, since the engines have not produced ahead of it yet, and so is what
    comes after the last ticket."""
    kind = kind or overlap_of(spans)
    windows = list(step_windows(spans, kind).values()) if kind.crosses_steps else []
    if len(windows) < 3:
        return ""
    last_ticket = max((span.end for span in spans.get("rollout", ()) if span.name == "rollout"), default=0.0)
    start, end = windows[1][0], min(windows[-1][1], last_ticket)
    if end <= start:
        return ""
    trainer = length(merged(_clipped(spans_within(spans, start, end).get("train", ()), start, end)))
    idle = [1.0 - seconds / (end - start) for seconds in (length(_generation(spans, start, end)), trainer)]
    line = f"engines idle {idle[0]:.0%}, trainer idle {idle[1]:.0%}"
    if min(idle) > BOTH_IDLE:
        return f"{line}: they wait for each other; a higher --max-staleness lets them overlap more"
    if abs(idle[0] - idle[1]) < EVEN:
        return f"{line}: their devices are divided well"
    return f"{line}: give the {'trainer' if idle[0] > idle[1] else 'engines'} a device more"


def step_metrics(spans: Spans, rollout_id: int, kind: Overlap | None = None) -> dict[str, float]:
    """``perf/idle/{role}``, ``perf/overlap`` (share of the streamed work that lay inside generation) and
    ``perf/wall_to_bound`` of a step whose work is done; empty if its rollout is not among the spans. kind: see
    ``step_stats``."""
    window = step_windows(spans, kind).get(rollout_id)
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


def without(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """What one union (see ``merged``) has, and another one has not."""
    gaps = pairwise([float("-inf"), *(edge for interval in right for edge in interval), float("inf")])
    return common(left, [gap for gap in islice(gaps, 0, None, 2) if gap[1] > gap[0]])


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
    if len(steps) < 2:
        return dict.fromkeys(steps, "")
    middle = {by_length[len(by_length) // 2]: "median length of those between"} if by_length else {}
    return {steps[0]: "first", **middle, steps[-1]: "last"}
