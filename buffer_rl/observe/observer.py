"""The run's observer: passes what the driver reports to display, metrics, sample dump, trace and hooks."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from buffer_rl.args import Args
from buffer_rl.errors import EndedBySignal
from buffer_rl.observe.metrics import METRICS_FILE, MetricHub
from buffer_rl.observe.progress import ROLLOUT_PHASES, Progress
from buffer_rl.observe.run_folder import (
    QUARANTINE_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    SampleDump,
    add_facts,
    read_facts,
    set_aside,
    write_facts,
)
from buffer_rl.observe.startup import StartUp
from buffer_rl.observe.timeline import TRACE_FILE, TraceFile, WorkSpan
from buffer_rl.observe.timeline_stats import Overlap, Spans, spans_after, step_metrics
from buffer_rl.options.redaction import mask_url
from buffer_rl.plan.roles import ACTOR, CRITIC
from buffer_rl.plan.schedule import RunResult, Schedule
from buffer_rl.plugin.calls import construct
from buffer_rl.plugin.registry import PluginRegistry

FIRST_REQUEST = "first request"
FAILED, STOPPED = "failed", "stopped"
MAX_REASON = 2000  # characters of an error in run.json
IDLE_STEPS = 10  # steps without a gradient, one after another, of which the user is told


def set_aside_other_run(run_dir: str | Path, lineage: str) -> None:
    """Set the files aside that a run of another lineage of checkpoints left in the folder. A run that resumes there
    would else take them for its own, and cut off their steps after its checkpoint."""
    if read_facts(run_dir).lineage in ("", lineage):  # "": no run, or one of before lineages were noted
        return
    for name in (METRICS_FILE, SAMPLES_FILE, TRACE_FILE, "tensorboard", RUN_FILE):
        set_aside(Path(run_dir, name))


class RunObserver:
    """Sees what happens in a run; what it raises ends the run. A context manager.

    resume_step: steps of the checkpoint that the run goes on from; its files are then continued from there.
    provenance: what code and data the run is made of, for ``run.json``. ``evaluated``: the newest version of which this
    run reported an evaluation.
    """

    def __init__(
        self,
        args: Args,
        registry: PluginRegistry,
        resume_step: int | None = None,
        provenance: Mapping[str, Any] | None = None,
        startup: StartUp | None = None,
    ) -> None:
        self._run_dir = run_dir = str(args.run_dir)
        write_facts(run_dir, args, provenance, startup.command if startup else (), resume_step)
        found = {name: registry.resolve("logger", name) for name in args.logger}
        loggers = {name: construct("logger", name, logger, args, run_dir) for name, logger in found.items()}
        self.evaluated = -1
        self._registry = registry
        self._metrics = MetricHub(run_dir, loggers, resume_step=resume_step)
        self._dump = SampleDump(run_dir, resume_step=resume_step)
        self._trace = TraceFile(run_dir, resume_step=resume_step) if args.trace else None
        self._spans: dict[str, list[WorkSpan]] = {}  # of the steps that are not logged yet
        self._under_way: Spans = {}
        self._known: Mapping[str, float] = {}  # what is logged of the step under way
        self._overlap = Overlap.of_options(args.schedule, args.stream_gradients, Schedule.of(args).max_staleness)
        self._startup = startup or StartUp()
        title = f"buffer-rl · {Path(run_dir).name}"
        progress = self._progress = Progress(args.progress, args.num_rollout, title=title, startup=self._startup)
        # What the display alone is told: the number of steps; parts that were started; finished and dropped groups of
        # the running rollout; lines for the user, from any thread.
        self.planned, self.ready = progress.planned, progress.ready
        self.groups, self.notice = progress.groups, progress.notice
        self._incidents = Incidents(run_dir)
        self._end = ("done", "")
        self._stack = ExitStack()

    def __enter__(self) -> RunObserver:
        self._stack.callback(self._metrics.close)
        self._stack.callback(self._dump.close)
        if self._trace is not None:
            self._stack.enter_context(self._trace)
        self._stack.enter_context(self._progress)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._say(self._incidents.summary())
        how, why = self._end if error is None else _end_by(error)
        with suppress(OSError, ValueError):  # neither of which may take the place of the run's own error
            add_facts(self._run_dir, end={"how": how, "why": why, "at": datetime.now(UTC).isoformat("T", "seconds")})
        self._stack.__exit__(kind, error, trace)

    def ended(self, result: RunResult) -> None:
        """How the run ended, if no error does. ``run.json`` has it, and the report shows it."""
        if result.signal is not None:
            self._end = (STOPPED, signal.Signals(result.signal).name)
        elif result.stopped_early:
            self._end = ("stopped early", result.why)

    def went_back(self, step: int | None) -> None:
        """The run goes on from the checkpoint after ``step`` steps, or from the start (None), and does again what came
        after it. Its files go back as well, as for a resumed run; loggers and hooks see those steps twice."""
        before = -1 if step is None else step
        self.evaluated = min(self.evaluated, before)
        self._metrics.went_back(before)
        self._dump.went_back(before)
        if self._trace is not None:
            self._trace.went_back(before)
        self._spans, self._under_way, self._known = {}, {}, {}
        self._progress.went_back(max(0, before))
        self._incidents.went_back(max(0, before))

    def phase(self, name: str) -> None:
        """The driver entered a phase: generate, train, save, publish, evaluate."""
        if name in ROLLOUT_PHASES and FIRST_REQUEST not in self._startup.times:
            self.ready(FIRST_REQUEST)
            add_facts(self._run_dir, start=self._startup.times)
        self._progress.phase(name)

    def rollout_ended(
        self, rollout_id: int, evaluation: bool, metrics: Mapping[str, float], samples: list[dict[str, Any]]
    ) -> None:
        """A rollout, or the evaluation of version ``rollout_id``, is done; ``samples``: some of its samples to show."""
        kind = "eval" if evaluation else "train"
        if not evaluation:
            self._say(self._incidents.rollout(rollout_id, metrics))
        self._dump.write(rollout_id, [{"kind": kind, **sample} for sample in samples])
        self._registry.call_hook(
            "buffer_rl_on_rollout_end", rollout_id=rollout_id, evaluation=evaluation, metrics=metrics
        )

    def trained(self, rollout_id: int, step: int, metrics: Mapping[str, float]) -> None:
        """The optimizer took step ``step`` and the Buffer committed the rollout."""
        self._registry.call_hook("buffer_rl_on_train_step", rollout_id=rollout_id, step=step, metrics=metrics)

    def published(self, version: int, metrics: Mapping[str, float]) -> None:
        """Every engine has ``version``."""
        self._registry.call_hook("buffer_rl_on_weight_update", version=version, metrics=metrics)

    def worked(self, role: str, spans: Sequence[WorkSpan]) -> None:
        """What a role did, and when."""
        if self._trace is not None:
            self._trace.write(role, spans)
        self._spans.setdefault(role, []).extend(spans)

    def under_way(self, spans: Spans) -> None:
        """What has begun and not ended, by role, until now: counted in the next ``step``, and again as ``worked``."""
        self._under_way = spans

    def known(self, step: int, metrics: Mapping[str, float]) -> None:
        """What is known of ``step`` before its checkpoint is written: a run that goes on from it lacks no step then."""
        self._known = {name: value for name, value in metrics.items() if not name.startswith("perf/")}
        self._metrics.log(self._known, step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rollout ``step`` was trained on and published: all metrics of the step."""
        begun = {role: [*self._spans.get(role, ()), *members] for role, members in self._under_way.items()}
        spans = {**self._spans, **begun}
        metrics = {**metrics, **step_metrics(spans, step, self._overlap)}
        self._spans, self._under_way = spans_after(self._spans, step, self._overlap), {}
        self._metrics.log({name: value for name, value in metrics.items() if name not in self._known}, step)
        self._known = {}
        self._progress.step(metrics, step)
        self._say(self._incidents.step(step, metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The weights of version ``step`` were evaluated."""
        self.evaluated = step
        self._metrics.log(metrics, step)
        self._progress.eval(metrics, step)

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._progress.notice(line)


def _end_by(error: BaseException) -> tuple[str, str]:
    if isinstance(error, EndedBySignal):
        return STOPPED, signal.Signals(error.number).name
    return FAILED, mask_url(f"{type(error).__name__}: {error}")[:MAX_REASON]


class Incidents:
    """What went wrong in a run that went on: groups in quarantine, optimizer steps that were left out, or had no
    gradient.

    The methods return lines for the user: one for each incident, and all of them at the end."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = Path(run_dir)
        self._quarantined: dict[int, int] = {}  # groups of a rollout
        self._left_out: dict[tuple[str, int], int] = {}  # optimizer steps of a role in a training step
        self._counted = Counter[str]()  # by the trainer, since its processes began
        self._idle = 0  # newest steps, one after another, whose gradient was 0

    def rollout(self, rollout_id: int, metrics: Mapping[str, float]) -> list[str]:
        """The incidents of a training rollout."""
        count = int(metrics.get("rollout/drop_quarantined", 0))
        self._quarantined[rollout_id] = count
        if not count:
            return []
        where = self._run_dir / QUARANTINE_FILE
        return [f"rollout {rollout_id}: {_groups(count)} put into quarantine, with their errors: {where}"]

    def step(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """The incidents of a training step."""
        lines = []
        for role, whose in ((ACTOR, ""), (CRITIC, "the critic's ")):
            total, before = int(metrics.get(f"{role}/non_finite_steps", 0)), self._counted[role]
            if total > before:
                self._counted[role], self._left_out[role, step] = total, total - before
                lines.append(f"step {step}: {whose}loss or gradient not finite; the weights stay as they were")
        self._idle = self._idle + 1 if metrics.get("train/grad_norm") == 0 else 0
        return [*lines, self._told_idle()] if self._idle == IDLE_STEPS else lines

    def _told_idle(self) -> str:
        why = "as when all rewards of a prompt are equal (docs/troubleshooting.md#the-reward-stays-at-0)"
        return f"the gradient was 0 in the last {self._idle} steps, and nothing was learned in them: {why}"

    def went_back(self, step: int) -> None:
        """Forget the incidents of ``step`` and later ones, which are done again, by other trainer processes."""
        self._quarantined = {rollout: count for rollout, count in self._quarantined.items() if rollout < step}
        self._left_out = {(role, at): count for (role, at), count in self._left_out.items() if at < step}
        self._counted.clear()
        self._idle = 0

    def summary(self) -> list[str]:
        """All incidents of the run."""
        lines = []
        if quarantined := sum(self._quarantined.values()):
            lines.append(f"{_groups(quarantined)} of this run in quarantine: {self._run_dir / QUARANTINE_FILE}")
        if left_out := sum(self._left_out.values()):
            where = self._run_dir / "non_finite"
            lines.append(f"{left_out} optimizer steps were not finite and were left out; their rows: {where}")
        return [*lines, self._told_idle()] if self._idle >= IDLE_STEPS else lines


def _groups(count: int) -> str:
    return "1 prompt group" if count == 1 else f"{count} prompt groups"
