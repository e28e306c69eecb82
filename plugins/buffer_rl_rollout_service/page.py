"""The service's statistics as one page, drawn as the report of a run is: it loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from buffer_rl.observe.svg_chart import TEMPLATES, Line, format_number, line_chart
from buffer_rl_rollout_service.store import NUM_BUCKETS, STATES

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SERIES = ("written", "delivered", "dropped")


def render_page(statistics: Mapping[str, Any], history: Mapping[str, Any]) -> tuple[str, str]:
    """The page, and its Content-Security-Policy. The arguments are those of ``Store``."""
    environment = Environment(
        loader=FileSystemLoader([Path(__file__).parent, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        facts=_facts(statistics),
        states={state: (statistics["groups"][state], statistics["trajectories"][state]) for state in STATES},
        dropped=statistics["dropped"],
        legend={name: colour for colour, name in enumerate(_SERIES)},
        charts=_charts(history),
    )
    return page, POLICY


def _facts(statistics: Mapping[str, Any]) -> dict[str, str]:
    groups, reward, oldest = statistics["groups"], statistics["avg_reward"], statistics["oldest_open_s"]
    return {
        "trajectories written": format_number(statistics["trajectories"]["written"]),
        "delivered": format_number(statistics["trajectories"]["delivered"]),
        "mean reward": "-" if reward is None else format_number(reward),
        "members of a group": str(statistics["group_size"]),
        "groups held": f"{groups['open'] + groups['ready'] + groups['leased']} of {statistics['capacity']}",
        "partial groups": str(statistics["partial_groups"]),
        "longest wait for a member": "-" if oldest is None else _duration(oldest),
        "repeated writes": str(statistics["duplicates"]),
        "leases expired": str(statistics["leases_expired"]),
    }


def _charts(history: Mapping[str, Any]) -> dict[str, str]:
    """By heading. Time ends now, in the unit in which it has at most 120 whole numbers, or hours."""
    width = history["width_s"]
    units = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
    name = next((unit for unit, size in units.items() if width * NUM_BUCKETS <= 120 * size), "hours")
    buckets = range(min(history["written"], default=1), 1)

    def line(series: str, colour: int, values: Mapping[int, float]) -> Line:
        points = [(bucket * width / units[name], values[bucket]) for bucket in buckets if bucket in values]
        return Line(name=series, points=points, colour=colour)

    def so_far(series: str) -> dict[int, float]:
        counts = history[series]
        return dict(zip(buckets, accumulate(counts.get(bucket, 0) for bucket in buckets), strict=True))

    totals = [line(series, colour, so_far(series)) for colour, series in enumerate(_SERIES)]
    reward = [line("reward", 1, history["reward"])]
    return {
        f"Trajectories so far ({name} before now)": line_chart(totals, label="Trajectories", width=1000, height=220),
        f"Mean reward of what was written ({name} before now)": line_chart(
            reward, label="Mean reward", width=1000, height=180
        ),
    }


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
