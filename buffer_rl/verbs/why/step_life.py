"""One step of a run: how long its phases took, which role waited for which, and what became of its groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from buffer_rl.buffer.ledger_audit import Transition
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.errors import ConfigError
from buffer_rl.observe.metrics import METRICS_FILE, drops_of, phase_seconds, steps_of
from buffer_rl.observe.run_folder import records_in
from buffer_rl.observe.timeline import read_trace
from buffer_rl.observe.timeline_stats import NO_ROLE, step_stats, step_windows
from buffer_rl.records.groups import GroupUid
from buffer_rl.verbs.run_records import RunRecords
from buffer_rl.verbs.table import shown_time

SHOWN_GROUPS = 12
FLEET_LOG = "logs/fleet.log"
_FAILURES = ("infra_failures", "data_failures", "non_finite_steps", "failed", "killed", "replayed")
"""Last parts of metrics; the last three are of agents."""


@dataclass(slots=True, kw_only=True)
class StepLife:
    """The facts. phases: seconds by phase, which add up to ``seconds``, in the order of a step. waits: seconds in which
    a role was idle and another one worked, by role. tickets: the rollouts that leased its groups. dropped: groups that
    the ticket of the same number rejected and quarantined, by reason; requeued: its leases and finished groups that
    went back. restarts: what began again meanwhile."""

    step: int
    seconds: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    waits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    weight_version: int | None = None
    committed: float | None = None
    selected: list[str] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)
    leased: int = 0
    in_work: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    requeued: int = 0
    failures: dict[str, float] = field(default_factory=dict)
    restarts: list[str] = field(default_factory=list)
    traced: bool = False
    at_work: bool = False

    def facts(self) -> dict[str, Any]:
        """As JSON values, with the sentences."""
        return {**asdict(self), "sentences": sentences(self), "not_recorded": not_recorded(self)}


def step_life(records: RunRecords, step: int) -> StepLife:
    """Raises ConfigError for a step that the run has not begun."""
    events, metrics = records.audit.of_rollout(step), steps_of(records_in(records.folder, METRICS_FILE))
    if not events and step not in metrics:
        steps = sorted({*metrics, *(rollout for rollout, _, _ in records.audit.commits())})
        known = f"a step from {steps[0]} to {steps[-1]}, or the one in work" if steps else "a run that has begun a step"
        raise ConfigError(f"the run has no step {step}", where="STEP", expected=known)
    of_step, spans = metrics.get(step, {}), read_trace(records.folder)
    life = StepLife(step=step, at_work=records.at_work)
    count_groups(life, events)
    life.tickets = next((s.tickets for s in records.audit.selections(-1) if s.rollout_id == step), [])
    if "perf/step_time" in of_step:
        life.seconds = of_step["perf/step_time"]
        life.phases = {name: seconds for name, seconds in phase_seconds(of_step).items() if seconds > 0}
    life.failures = {name: value for name, value in of_step.items() if value and name.rpartition("/")[2] in _FAILURES}
    life.dropped = life.dropped or drops_of(of_step)  # of the ticket, if groups are not in the ledger
    if (window := step_windows(spans).get(step)) is not None:
        life.traced, life.waits = True, step_stats(spans, step, window).waits
    log = records.folder / FLEET_LOG
    if events and log.is_file():
        times = [line.time for _, line in events]
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        life.restarts += engine_changes(lines, min(times), max(times))
    return life


def count_groups(life: StepLife, events: Sequence[tuple[GroupUid, Transition]]) -> None:
    """Fill in what the ledger has. events: those of the rollout."""
    dropped = Counter[str]()
    openings: dict[str, list[float]] = {}
    live = Counter[GroupUid]()
    for uid, line in events:
        if line.after is GroupState.LEASED:
            life.leased += 1
            live[uid] += 1
        elif line.before is GroupState.LEASED:
            live[uid] -= 1
        if line.after in (GroupState.REJECTED, GroupState.QUARANTINED):
            quarantined = " (quarantine)" if line.after is GroupState.QUARANTINED else ""
            dropped[f"{line.reason}{quarantined}"] += 1
        elif line.after is GroupState.PENDING:
            life.requeued += 1
            if line.reason:
                openings.setdefault(line.reason, []).append(line.time)
        elif line.after is GroupState.TRAINED:
            life.trained.append(str(uid))
            life.weight_version, life.committed = line.step, line.time
        elif line.before is GroupState.FINISHED and line.after is GroupState.FINISHED:
            life.selected.append(str(uid))
    life.in_work = sum(1 for count in live.values() if count > 0)
    life.dropped = dict(dropped.most_common())
    for reason, times in openings.items():
        what = "the Buffer began again with its ledger" if reason == "restart" else "the run went back to a checkpoint"
        life.restarts.append(f"{shown_time(times[-1])} {what}; {len(times)} groups of it went back to the queue")


def engine_changes(lines: Sequence[str], start: float, end: float) -> list[str]:
    """The lines of the log on engines, ``DATE TIME text``, between two times in seconds since 1970."""
    found = []
    for line in lines:
        try:
            time = datetime.fromisoformat(line[:19]).timestamp()
        except ValueError:
            continue
        if int(start) <= time <= end:
            found.append(line)
    return found


def sentences(life: StepLife) -> list[str]:
    """The step as plain sentences."""
    lines = []
    if life.seconds is not None and life.phases:
        parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in life.phases.items())
        slowest = max(life.phases, key=lambda name: life.phases[name])
        share = life.phases[slowest] / max(sum(life.phases.values()), 1e-9)
        lines.append(f"It took {life.seconds:.3f} s: {parts}. The longest phase was {slowest}, {share:.0%}.")
    lines += [_waited(role, waits) for role, waits in life.waits.items() if any(waits.values())]
    lines.append(_groups(life))
    if life.leased:
        work = f"; in work: {life.in_work}" if life.in_work else ""
        lines.append(f"The ticket train_{life.step} leased {life.leased} groups, {life.requeued} went back{work}.")
    if life.dropped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in life.dropped.items())
        lines.append(f"Dropped: {reasons}.")
    if life.failures:
        counted = ", ".join(f"{name} {value:g}" for name, value in life.failures.items())
        lines.append(f"Failures: {counted}.")
    lines += [f"Began again, or changed: {line}." for line in life.restarts]
    return lines


def _waited(role: str, waits: Mapping[str, float]) -> str:
    named = sorted(((s, other) for other, s in waits.items() if s > 0 and other != NO_ROLE), reverse=True)
    parts = [f"{seconds:.3f} s for {other}" for seconds, other in named]
    if waits.get(NO_ROLE):
        parts.append(f"{waits[NO_ROLE]:.3f} s while no role worked")
    return f"{role} waited {', '.join(parts)}."


def _groups(life: StepLife) -> str:
    chosen = life.trained or life.selected
    more = f" and {len(chosen) - SHOWN_GROUPS} more" if len(chosen) > SHOWN_GROUPS else ""
    names = ", ".join(chosen[:SHOWN_GROUPS]) + more
    by = f", leased by {', '.join(f'train_{ticket}' for ticket in life.tickets)}" if life.tickets else ""
    if life.trained and life.committed is not None:
        at = f"made weight version {life.weight_version}, committed at {shown_time(life.committed)}"
        return f"It trained on {len(chosen)} groups ({at}{by}): {names}."
    if life.selected:
        return f"It selected {len(chosen)} groups{by}, and has not committed them: {names}."
    if not life.at_work:
        return "It has not selected its groups, and no process of this machine writes the ledger: the run has ended."
    return "It has not selected its groups yet."


def not_recorded(life: StepLife) -> list[str]:
    """What the run's folder does not have."""
    missing = []
    if life.seconds is None:
        missing.append("how long it took (metrics.jsonl has a step when it has ended)")
    if not life.traced:
        missing.append("which role waited for which (trace.json has no whole step of this number)")
    return missing
