"""What a run learned, and where its files are, for the reports at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from buffer_rl.files.remote import local_path
from buffer_rl.observe.curve import CURVE_FILE, curves_of
from buffer_rl.observe.metrics import METRICS_FILE
from buffer_rl.observe.run_folder import SAMPLES_FILE, read_facts
from buffer_rl.observe.terminal import printable
from buffer_rl.observe.timeline import TRACE_FILE

REPORT_FILE = "report.html"


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
    return [
        EvalGain(
            name=name,
            first_step=series.steps[0],
            before=series.values[0],
            last_step=series.steps[-1],
            after=series.values[-1],
        )
        for name, series in curves_of(records).evals.items()
    ]


def gain_table(gains: Iterable[EvalGain], title: str = "Mean reward on evaluation prompts") -> Table:
    """The table: a row an evaluation set."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("evaluation set")
    for heading in ("before", "after", "gain", "steps"):
        table.add_column(heading, justify="right")
    for gain in gains:
        if gain.first_step == gain.last_step:  # evaluated once: there is nothing to compare with
            table.add_row(Text(printable(gain.name)), "-", f"{gain.after:.3f}", "-", str(gain.last_step))
            continue
        style = "green" if gain.gain > 0 else "red" if gain.gain < 0 else ""
        steps = f"{gain.first_step} → {gain.last_step}"
        change = Text(gain.shown_gain, style=style)
        table.add_row(Text(printable(gain.name)), f"{gain.before:.3f}", f"{gain.after:.3f}", change, steps)
    return table


def run_files(run_dir: str | Path) -> dict[str, Path]:
    """What a run left behind that exists: name of the thing to its path."""
    folder = Path(run_dir)
    candidates = {
        "report": folder / REPORT_FILE,
        "picture": folder / CURVE_FILE,
        "metrics": folder / METRICS_FILE,
        "samples": folder / SAMPLES_FILE,
        "trace (ui.perfetto.dev)": folder / TRACE_FILE,
        "TensorBoard": folder / "tensorboard",
        "model (Hugging Face)": folder / "hf",
        "checkpoints": Path(local_path(str(read_facts(folder).changed.get("--save", folder / "checkpoints")))),
        "quarantined prompts": folder / "quarantine.jsonl",
        "rows of bad steps": folder / "non_finite",
        "logs": folder / "logs",
    }
    return {name: path for name, path in candidates.items() if path.exists()}
