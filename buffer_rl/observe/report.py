"""The HTML report of a run: one self-contained page, which needs no network. What a run learned, and where its files
are, in the terminal at its end.

``templates/report.html`` is the page; ``buffer_rl.observe.page`` fills it in.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from buffer_rl.files.remote import local_path
from buffer_rl.observe.checks import UNREAD, Check, Evidence, LedgerFacts, State, checks_of
from buffer_rl.observe.curve import CURVE_FILE, curves_of, draw_curves, sparkline
from buffer_rl.observe.figures import drops_figure, learning_curve, phase_table, small_charts, timeline
from buffer_rl.observe.gains import EvalGain, eval_gains, gain_table
from buffer_rl.observe.metrics import METRICS_FILE, PARTS_OF_ROLLOUTS, read_metrics, steps_of
from buffer_rl.observe.page import render_page, write_page
from buffer_rl.observe.progress import format_duration
from buffer_rl.observe.run_folder import QUARANTINE_FILE, SAMPLES_FILE, RunFacts, read_facts, records_in
from buffer_rl.observe.sample_groups import followed_prompts, prompt_groups
from buffer_rl.observe.startup import text_of
from buffer_rl.observe.svg_chart import format_number
from buffer_rl.observe.terminal import printable
from buffer_rl.observe.timeline import TRACE_FILE, read_trace
from buffer_rl.observe.timeline_stats import Spans, advice
from buffer_rl.options.redaction import MASK

REPORT_FILE = "report.html"
MARKS = {State.RIGHT: "✓", State.WRONG: "✗", State.UNKNOWN: "?"}


@dataclass(kw_only=True)
class Report(Evidence):
    """What the page shows. ``files``: name of a thing to its address relative to the page."""

    title: str
    files: Mapping[str, str] = field(default_factory=dict)
    spans: Spans = field(default_factory=dict)


def read_report(run_dir: str | Path, title: str = "", ledger: LedgerFacts = UNREAD) -> Report:
    """The files of the run in ``run_dir``, without their addresses. ledger: what the run's ledger says, for the check
    of its prompts. Raises DataError if the run has no metrics or a line of its files is damaged."""
    folder = Path(run_dir)
    return Report(
        title=title or folder.absolute().name,
        metrics=read_metrics(folder),
        samples=records_in(folder, SAMPLES_FILE),
        facts=read_facts(folder),
        spans=read_trace(folder),
        ledger=ledger,
    )


def write_report(report: Report, run_dir: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of the run in ``run_dir`` to ``output``, or to ``report.html`` there; returns its path. Raises
    ConfigError if it cannot be written."""
    target = Path(run_dir, REPORT_FILE) if output is None else Path(output)
    files, page_folder = run_files(run_dir).items(), target.absolute().parent
    addresses = {name: os.path.relpath(path.absolute(), page_folder) for name, path in files if path != target}
    report.files = {name: quote(address) for name, address in addresses.items()}
    return write_page(render_report(report), target)


def run_report(run_dir: str | Path, console: Console | None = None, ledger: LedgerFacts = UNREAD) -> list[EvalGain]:
    """Print what the run in ``run_dir`` learned and where its files are, draw its picture and write its page.

    Returns the gains that the table shows. ledger: as in ``read_report``. Raises DataError if the run has no metrics.
    """
    out = console or Console()
    report = read_report(run_dir, ledger=ledger)
    gains, curves = eval_gains(report.metrics), curves_of(report.metrics)
    draw_curves(curves, "Learning curve").savefig(Path(run_dir, CURVE_FILE))
    write_report(report, run_dir)
    out.print()
    if gains:
        out.print(gain_table(gains))
    else:
        why = "--eval-prompt-data NAME=PATH says on what, --eval-interval N when"
        if report.facts.option("--load-debug-rollout-data"):
            why = "--load-debug-rollout-data trains on recorded rollouts, without engines"
        out.print(f"This run evaluated nothing: {why}.", markup=False)
    lines = []
    if rewards := curves.reward.values:
        lines.append(f"training reward  {rewards[0]:.3f}  {sparkline(rewards)}  {rewards[-1]:.3f}")
    if seconds := sum(record.get("perf/step_time") or 0.0 for record in report.metrics):
        lines.append(f"training steps took {format_duration(seconds)} together")
    if start := report.facts.start:
        lines.append(f"start: {text_of(start)}")
    files = run_files(run_dir)
    width = max(map(len, files), default=0)
    lines += [*check_lines(checks_of(report)), *(f"{name:<{width}}  {path}" for name, path in files.items())]
    for line in lines:
        out.print(Text(printable(line)), highlight=False, soft_wrap=True)
    return gains


def check_lines(checks: Sequence[Check]) -> list[str]:
    """For the terminal: the checks on one line, and below it what is wrong."""
    line = "  ".join(f"{MARKS[check.state]} {check.name}" for check in checks)
    return [f"checks: {line}", *(f"WRONG: {check.name}: {fault}" for check in checks for fault in check.faults)]


def render_report(report: Report) -> str:
    """The page as text."""
    facts, steps = report.facts, steps_of(report.metrics)
    phases, phase_charts = phase_table(steps)
    key = str(facts.option("--reward-key") or "")
    groups = prompt_groups(report.samples, reward_key=key, supervised=facts.is_supervised)
    charts = [learning_curve(report.metrics), *small_charts(steps)]
    return render_page(
        "report.html",
        report=report,
        checks=checks_of(report),
        marks=MARKS,
        head=_head(facts, steps),
        command=shlex.join(facts.command),
        changed=_shown(facts.changed),
        parts=parts_of(facts),
        gains=eval_gains(report.metrics),
        curves=[chart for chart in charts if chart.picture],
        phases=phases,
        phase_charts=phase_charts,
        timeline=timeline(report.spans),
        advice=advice(report.spans),
        drops=drops_figure(steps),
        groups=groups,
        num_shown=sum(len(group.answers) for group in groups),
        followed=followed_prompts(report.samples, reward_key=key),
        sample_kinds={kind: kind for kind in sorted({group.kind for group in groups})},
        sample_steps={step: f"step {step}" for step in sorted({group.step for group in groups})},
        is_supervised=facts.is_supervised,
    )


def _head(facts: RunFacts, steps: Mapping[int, Mapping[str, float]]) -> dict[str, str]:
    """What the run was, and how it went: name to text; what is not known is empty."""
    seconds = sum(metrics.get("perf/step_time", 0.0) for metrics in steps.values())
    sampled = sum(m.get(f"{part}/generated_tokens", 0.0) for m in steps.values() for part in PARTS_OF_ROLLOUTS)
    reward = next((str(facts.option(flag)) for flag in _REWARDS if facts.option(flag)), "")
    first = facts.parts[0] if facts.parts else {"started": facts.started}
    begin = facts.parts[-1].get("from_step") if facts.parts else 0
    batch, samples = facts.option("--rollout-batch-size"), facts.option("--n-samples-per-prompt")
    return {
        "algorithm": algorithm_text(facts),
        "reward": "" if facts.is_supervised else reward,
        "data": ", ".join(map(str, facts.option("--prompt-data") or ())),
        "model": str(facts.option("--hf-checkpoint") or ""),
        "batch": f"{batch} prompts × {samples} sample{'s' * (samples != 1)}" if batch and samples else "",
        "seed": "" if facts.option("--seed") is None else str(facts.option("--seed")),
        "schedule": str(facts.option("--schedule") or ""),
        "training steps": str(len(steps)),
        "time in steps": format_duration(seconds) if seconds else "",
        "tokens sampled": format_number(sampled) if sampled else "",
        "started": _time(str(first.get("started", ""))) if not first.get("from_step") else "",
        "continued": f"after step {begin}, {_time(facts.started)}" if begin else "",
        "start-up": text_of(facts.start),
        "ended": end_text(facts),
        "buffer_rl": facts.version,
    }


def _shown(changed: Mapping[str, Any]) -> dict[str, Any]:
    return {flag: value for flag, value in changed.items() if value != MASK}


def parts_of(facts: RunFacts) -> list[dict[str, Any]]:
    """The parts of a run that was resumed, in their order, empty for another one: ``first`` step, ``started``,
    ``command``, and ``changes``: flag to the values of the part before and of this one, as text."""
    found: list[dict[str, Any]] = []
    before: Mapping[str, str] = {}
    for part in facts.parts if len(facts.parts) > 1 else ():
        shown, started = _shown(part.get("changed") or {}), _time(str(part.get("started", "")))
        now = {flag: json.dumps(value, ensure_ascii=False) for flag, value in shown.items()}
        command = shlex.join(map(str, part.get("command") or ()))
        flags = sorted({*before, *now} - {"--load"}) if found else []
        values = {flag: (before.get(flag, "default"), now.get(flag, "default")) for flag in flags}
        changes = {flag: f"{old} → {new}" for flag, (old, new) in values.items() if old != new}
        found.append({"first": part.get("from_step", 0), "started": started, "command": command, "changes": changes})
        before = now
    return found


_REWARDS = ("--custom-rm-path", "--custom-group-rm-path", "--rm-type", "--rm-model", "--agent-path", "--environment")
"""What may score samples, the stronger first."""


def algorithm_text(facts: RunFacts) -> str:
    """The estimator and the loss of a run."""
    if facts.is_supervised:
        return "supervised (sft_loss)"
    estimator = facts.option("--custom-advantage-function-path") or facts.option("--advantage-estimator")
    return ", ".join(filter(None, (str(estimator or ""), f"loss {facts.loss}" if facts.loss else "")))


def end_text(facts: RunFacts) -> str:
    """How a run ended, when, and why; if nothing was noted, that."""
    if not facts.started:
        return ""
    if not facts.end:
        return "not yet, or it was killed" if facts.options else ""
    how, why = facts.end.get("how", ""), facts.end.get("why", "")
    return f"{how}, {_time(facts.end.get('at', ''))}" + (f": {why}" if why else "")


def _time(text: str) -> str:
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except ValueError:
        return text


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
        "quarantined prompts": folder / QUARANTINE_FILE,
        "rows of bad steps": folder / "non_finite",
        "logs": folder / "logs",
    }
    return {name: path for name, path in candidates.items() if path.exists()}
