"""Draw ``docs/schedules.svg``, one step under each schedule: ``python docs/timelines.py``.

The costs are made up and exact, so that the picture shows the schedules and no machine: eight groups, one of which
takes far longer than the rest; a trainer that needs some time for each group.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from buffer_rl.observe.svg_chart import WIDTH, headline, names_shown, picture_file, step_lanes
from buffer_rl.observe.timeline import WorkSpan
from buffer_rl.observe.timeline_stats import Spans, spans_within, step_stats

PICTURE = Path(__file__).with_name("schedules.svg")
GROUPS = (1.1, 1.4, 1.7, 2.1, 2.6, 3.3, 4.4, 8.0)
"""Seconds after which each group of the rollout is finished."""
REFERENCE, GRADIENT = 0.25, 0.5
"""Seconds of work on one group: reference log-probabilities; forward and backward."""
OPTIMIZER, PUBLISH = 0.3, 0.4


def lockstep() -> Spans:
    """The trainer starts after the last group."""
    rounds, last = len(GROUPS), GROUPS[-1]
    return _step([_span("ref_log_probs", last, last + REFERENCE * rounds)], GRADIENT * rounds + OPTIMIZER)


def pipelined() -> Spans:
    """The trainer computes each finished group's log-probabilities while the others are generated."""
    return _step(_as_finished("train_log_probs", REFERENCE), GRADIENT * len(GROUPS) + OPTIMIZER)


def streamed_gradients() -> Spans:
    """The trainer does all of its work on each finished group but the optimizer's step."""
    return _step(_as_finished("train", REFERENCE + GRADIENT), OPTIMIZER)


def render() -> str:
    """The picture as text."""
    cases = {
        "--schedule lockstep": lockstep(),
        "--schedule pipelined": pipelined(),
        "--schedule pipelined --stream-gradients": streamed_gradients(),
    }
    seconds = max(step_stats(spans, 0).wall for spans in cases.values())
    parts, top = [], 24
    for flags, spans in cases.items():
        stats = step_stats(spans, 0)
        lanes, height = step_lanes(spans_within(spans, stats.start, stats.end), stats, seconds)
        parts.append(f'<text x="14" y="{top}" class="heading">{flags}</text>{_legend(names_shown(spans), top)}')
        parts.append(f'<text x="14" y="{top + 17}">{headline(stats)}</text>')
        parts.append(f'<g transform="translate(0,{top + 26})">{"".join(lanes)}</g>')
        top += height + 66
    label = "One step under each schedule, on one time scale"
    return picture_file(parts, label=label, width=WIDTH, height=top - 20)


def _as_finished(name: str, cost: float) -> list[WorkSpan]:
    """Work of one worker on each group, in the order in which they are finished."""
    ends = list(accumulate(GROUPS, lambda free, ready: max(free, ready) + cost, initial=0.0))[1:]
    return [_span(name, end - cost, end) for end in ends]


def _step(trainer: list[WorkSpan], update: float) -> Spans:
    updated = trainer[-1].end + update
    return {
        "rollout": [_span("rollout", 0.0, GROUPS[-1])],
        "train": [*trainer, _span("update", trainer[-1].end, updated)],
        "publish": [WorkSpan(name="publish", rollout_id=1, start=updated, end=updated + PUBLISH)],
    }


def _span(name: str, start: float, end: float) -> WorkSpan:
    return WorkSpan(name=name, rollout_id=0, start=start, end=end)


def _legend(names: dict[str, int], bottom: int) -> str:
    """The names beside their colours, right of a heading."""
    parts, x = [], 330
    for name, colour in names.items():
        parts.append(f'<rect class="bar c{colour}" x="{x}" y="{bottom - 10}" width="11" height="11" rx="3"/>')
        parts.append(f'<text x="{x + 17}" y="{bottom}">{name}</text>')
        x += 35 + 6 * len(name)
    return "".join(parts)


if __name__ == "__main__":
    PICTURE.write_text(render(), encoding="utf-8")
