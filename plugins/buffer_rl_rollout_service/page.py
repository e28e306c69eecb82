"""The service's statistics as one page, drawn as the report of a run is: it loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Mapping
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
        bucket=_duration(history["width_s"]),
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
    """By heading. The time is in units of which the axis shows whole numbers, and ends now."""
    seconds = history["width_s"] * NUM_BUCKETS
    unit, name = next(
        (u, n) for u, n in ((1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours")) if seconds <= 120 * u or u == 3600.0
    )

    def line(series: str, colour: int, empty: float | None) -> Line:
        values = history[series]
        oldest = min(history["written"], default=0)
        buckets = [bucket for bucket in range(oldest, 1) if empty is not None or bucket in values]
        points = [(bucket * history["width_s"] / unit, values.get(bucket, empty)) for bucket in buckets]
        return Line(name=series, points=points, colour=colour)

    counts = line_chart(
        [line(series, colour, 0.0) for colour, series in enumerate(_SERIES)] if history["written"] else [],
        label="Trajectories over time",
        width=1000,
        height=220,
    )
    reward = line_chart([line("reward", 1, None)], label="Mean reward over time", width=1000, height=180)
    return {
        f"Trajectories in {_duration(history['width_s'])} ({name} before now)": counts,
        f"Mean reward of what was written ({name} before now)": reward,
    }


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
