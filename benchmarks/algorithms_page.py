"""What ``algorithms.py`` shows of its runs: gains with their standard errors, a table, and a picture of the curves."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from buffer_rl.observe.curve import moving_mean
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.observe.run_folder import SAMPLES_FILE, read_jsonl
from buffer_rl.observe.svg_chart import Line, line_chart, picture_file

EVAL_SET = "heldout"
MOST_PROMPTS = 400
"""Groups of an evaluation that are written to ``samples.jsonl``: all words of the quickstart's held-out set."""
BOUND = 2.0
"""Standard errors that a gain must exceed: by chance alone 2.3 percent of runs that learn nothing do."""
SMOOTHING_STEPS = 9
BEGIN, END = "<!-- written by benchmarks/algorithms.py -->", "<!-- end of what benchmarks/algorithms.py writes -->"
_PANEL, _COLUMNS, _GAP = (308, 190), 3, 14
_GREY = 7
_CLIPPED = ("train/pg_clipfrac", "train/sequence_clipfrac", "train/cispo_clipfrac")
_HEADINGS = (
    "algorithm",
    "before",
    "after",
    "gain",
    "standard error",
    "gain / error",
    "above 2",
    "clipped",
    "minutes",
    "its options",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. before, after: mean reward on the held-out prompts. error: standard error of the gain. clipped: share of
    tokens (of responses, where they have one ratio), mean of the rollouts. rewards: mean of each rollout over its
    groups, with those that the filter dropped."""

    title: str
    options: str
    before: float
    after: float
    error: float
    num_prompts: int
    clipped: float
    seconds: float
    rewards: Sequence[float]

    @property
    def gain(self) -> float:
        """``after - before``."""
        return self.after - self.before

    @property
    def errors(self) -> float:
        """The gain in standard errors."""
        return self.gain / self.error if self.error > 0 else math.copysign(math.inf, self.gain)

    @property
    def learned(self) -> bool:
        """Whether the gain is more than chance."""
        return self.gain > 0 and self.errors > BOUND

    def as_json(self) -> dict[str, Any]:
        """All numbers."""
        return {**asdict(self), "gain": self.gain, "gain_in_errors": self.errors, "learned": self.learned}


def measure(run_dir: Path, steps: int, *, title: str, options: str, seconds: float) -> Outcome:
    """Read a run's files. Raises DataError if one is damaged, ValueError if an evaluation is not complete."""
    samples = [record for record in read_jsonl(run_dir / SAMPLES_FILE) if record["kind"] == "eval"]
    before, after = prompt_scores(samples, 0), prompt_scores(samples, steps)
    records = read_metrics(run_dir)
    clipped = [record[name] for record in records for name in _CLIPPED if record.get(name) is not None]
    return Outcome(
        title=title,
        options=options,
        before=fmean(before.values()),
        after=fmean(after.values()),
        error=error_of_gain(before, after),
        num_prompts=len(before),
        clipped=fmean(clipped) if clipped else 0.0,
        seconds=seconds,
        rewards=[record["rollout/raw_reward_all"] for record in records if "rollout/raw_reward_all" in record],
    )


def prompt_scores(samples: Sequence[Mapping[str, Any]], step: int) -> dict[str, float]:
    """Mean reward of each prompt's samples in the evaluation of the weights after ``step`` steps."""
    rewards: dict[str, list[float]] = {}
    for record in samples:
        if record["rollout_id"] == step:
            rewards.setdefault(record["prompt"], []).append(float(record["reward"]))
    return {prompt: fmean(values) for prompt, values in rewards.items()}


def error_of_gain(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Standard error of the mean gain over prompts that were evaluated twice.

    The gain is the mean of ``d_p = after_p - before_p`` over the P prompts; ``after_p`` and ``before_p`` are means over
    a prompt's samples. The prompts are drawn independently, so the ``d_p`` are independent and of one distribution:
    ``Var(gain) = Var(d) / P``, estimated without bias by ``s^2 / P``, where
    ``s^2 = sum (d_p - gain)^2 / (P - 1)``. ``Var(d) = Var(after) + Var(before) - 2 Cov(after, before)``: words that are
    easy before are easy after, and pairing takes that out of the error. The chance in sampling a prompt's few responses
    is in the d_p, hence in ``s^2``; that of training is not: another seed gives another model.

    Raises ValueError if the prompts are fewer than two or not the same.
    """
    if before.keys() != after.keys() or len(before) < 2:
        raise ValueError(f"{len(before)} prompts before and {len(after)} after: not twice the same two or more")
    gains = [after[prompt] - before[prompt] for prompt in before]
    mean = fmean(gains)
    return math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1) / len(gains))


def table(outcomes: Mapping[str, Outcome | None], titles: Mapping[str, str], shared: str) -> str:
    """The Markdown table, a row an algorithm; below it what was measured."""
    rows = [
        f"| {' | '.join(_HEADINGS)} |",
        "|---" * len(_HEADINGS) + "|",
    ]
    for name, outcome in outcomes.items():
        if outcome is None:
            rows.append(f"| {titles[name]} | | | | | | no result | | | |")
            continue
        cells = [
            titles[name],
            f"{outcome.before:.3f}",
            f"{outcome.after:.3f}",
            f"{outcome.gain:+.3f}",
            f"{outcome.error:.3f}",
            f"{outcome.errors:.1f}",
            "yes" if outcome.learned else "no",
            f"{outcome.clipped:.1%}",
            f"{outcome.seconds / 60:.1f}",
            f"`{outcome.options}`" if outcome.options else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    counts = sorted({outcome.num_prompts for outcome in outcomes.values() if outcome is not None})
    prompts = " or ".join(map(str, counts)) or "no"
    return "\n".join(rows) + (
        f"\n\nAll runs: `{shared}`. Scores: mean reward, 1 for the right word, else 0, on {prompts} held-out words.\n"
        f"Of {date.today().isoformat()}, Python {platform.python_version()}, {os.cpu_count()} cores.\n"
    )


def page_with(page: str, text: str, begin: str = BEGIN, end_marker: str = END) -> str:
    """``page`` with ``text`` between the markers. Raises ValueError if it lacks them."""
    start, end = page.index(begin) + len(begin), page.index(end_marker)
    return f"{page[:start]}\n\n{text}\n{page[end:]}"


def draw(outcomes: Sequence[Outcome]) -> str:
    """The picture: a panel an algorithm, with its curve, those of the others in grey, and both evaluations as dots."""
    curves = [smoothed(outcome.rewards) for outcome in outcomes]
    width, height = _PANEL
    parts = []
    for number, outcome in enumerate(outcomes):
        row, column = divmod(number, _COLUMNS)
        others = [
            Line(name=other.title, points=curve, colour=_GREY, faint=True)
            for other, curve in zip(outcomes, curves, strict=True)
            if other is not outcome
        ]
        colour = number % _GREY
        ends = [(0.0, outcome.before), (float(len(outcome.rewards)), outcome.after)]
        own = Line(name=outcome.title, points=curves[number], colour=colour)
        dots = [Line(name="held-out words", points=[end], colour=colour, marked=True) for end in ends]
        label = f"{outcome.title}: reward over rollouts"
        chart = line_chart([*others, own, *dots], label=label, width=width, height=height, unit_range=True)
        left, top = _GAP + column * (width + _GAP), 30 + row * (height + 44)
        place = f'<svg x="{left}" y="{top + 8}" width="{width}" height="{height}" '
        parts.append(f'<text x="{left + 8}" y="{top}" class="heading">{escape(outcome.title)}</text>')
        scores = f"{outcome.before:.2f} → {outcome.after:.2f}"
        parts.append(f'<text x="{left + width - 12}" y="{top}" text-anchor="end">{scores}</text>')
        parts.append(chart.replace("<svg ", place, 1))
    rows = math.ceil(len(outcomes) / _COLUMNS)
    note = f"Lines: training reward, mean of {SMOOTHING_STEPS} steps; grey: the others. Dots, numbers: held-out words."
    bottom = 30 + rows * (height + 44)
    parts.append(f'<text x="{_GAP + 8}" y="{bottom}">{note}</text>')
    label = "Reward in training over rollouts, a panel an algorithm"
    return picture_file(parts, label=label, width=_GAP + _COLUMNS * (width + _GAP), height=bottom + 16)


def smoothed(rewards: Sequence[float]) -> list[tuple[float, float]]:
    """Points of a curve: rollout and mean of the rewards around it."""
    return [(float(step), value) for step, value in enumerate(moving_mean(rewards, SMOOTHING_STEPS))]
