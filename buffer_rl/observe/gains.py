"""What a run learned: the first against the last evaluation of each set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from buffer_rl.observe.curve import curves_of
from buffer_rl.observe.terminal import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalGain:
    """Mean reward on one evaluation set at the first and the last evaluation of a run."""

    name: str
    first_step: int
    before: float
    last_step: int
    after: float

    @property
    def gain(self) -> float:
        """``after - before``."""
        return self.after - self.before

    @property
    def shown_gain(self) -> str:
        """The gain with its sign, three digits and no negative zero."""
        return f"{round(self.gain, 3) + 0.0:+.3f}"


def eval_gains(records: Iterable[Mapping[str, Any]]) -> list[EvalGain]:
    """First against last evaluation, one entry an evaluation set that was evaluated, in the order first seen."""
    gains = []
    for name, series in curves_of(records).evals.items():
        steps, values = series.steps, series.values
        gains.append(EvalGain(name=name, first_step=steps[0], before=values[0], last_step=steps[-1], after=values[-1]))
    return gains


def gain_table(gains: Iterable[EvalGain], title: str = "Mean reward on evaluation prompts") -> Table:
    """The table: a row an evaluation set."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("evaluation set")
    for heading in ("before", "after", "gain", "steps"):
        table.add_column(heading, justify="right")
    for gain in gains:
        if gain.first_step == gain.last_step:  # evaluated once: there is nothing to compare with
            values = ("-", f"{gain.after:.3f}") if gain.last_step else (f"{gain.before:.3f}", "-")
            table.add_row(Text(printable(gain.name)), *values, "-", str(gain.last_step))
            continue
        style = "green" if gain.gain > 0 else "red" if gain.gain < 0 else ""
        steps = f"{gain.first_step} → {gain.last_step}"
        change = Text(gain.shown_gain, style=style)
        table.add_row(Text(printable(gain.name)), f"{gain.before:.3f}", f"{gain.after:.3f}", change, steps)
    return table
