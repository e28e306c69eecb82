"""Whole runs in virtual time, over the real driver and Buffer: random schedules with deaths, failures and resumes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.environment import StopRequest
from buffer_rl.data.source import EvalSource, PromptDataSource
from buffer_rl.driver.driver import Driver
from buffer_rl.errors import TrainError
from buffer_rl.observe.timeline import WorkReport
from buffer_rl.options.section import compose
from buffer_rl.plan.schedule import Mode, RolePlan, RunPlan, Schedule
from buffer_rl.records.groups import GroupUid, RolloutReport, SampleGroup, Ticket
from harness.fake_roles import FakeTrain
from harness.ledger_contents import entries
from harness.saved_state import load_saved, saved_state
from harness.virtual_rollouts import VirtualEngines, VirtualRollouts, VirtualSelections, lognormal
from harness.virtual_time import VirtualRuntime

NUM_ROWS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run is drawn from. Times in virtual seconds; ``deaths`` are of the rollout worker and of the Buffer.
    ends_short: share of tickets that replace nothing. No later ticket makes up for the last ones, so that the last step
    may have no group; the run ends with the step before then."""

    schedule: Schedule
    groups_per_step: int = 3
    num_samples: int = 2
    num_steps: int = 15
    sigma: float = 1.0
    slots: int = 4
    load_s: float = 0.5
    train_s: float = 5.0
    drops: float = 0.0
    fails: float = 0.0
    workers: int = 1
    quarantines: float = 0.0
    worker_deaths: int = 0
    buffer_deaths: int = 0
    ends_short: float = 0.0
    eval_interval: int | None = None
    stops_at: int | None = None
    seed: int = 0


def drawn(seed: int) -> Setting:
    """A random setting."""
    draw = Random(seed)
    target = draw.choice([0, 1, 1, 2, 3, 4])
    bound = target + (draw.choice([0, 0, 1, 2]) if target else 0)
    mode = Mode.ASYNC
    if bound == 0:
        mode = draw.choice([Mode.ASYNC, Mode.LOCKSTEP, Mode.PIPELINED])
    elif (target, bound) == (1, 1):
        mode = draw.choice([Mode.ASYNC, Mode.ONE_STEP_OFF])
    streams = mode is Mode.PIPELINED or (mode is Mode.ASYNC and seed % 2 == 0)
    drains = mode is Mode.ONE_STEP_OFF
    num_steps = draw.choice([8, 12, 18])
    return Setting(
        schedule=Schedule(mode=mode, target=target, max_staleness=bound, streams=streams, drains=drains),
        groups_per_step=draw.choice([2, 3, 4]),
        num_steps=num_steps,
        sigma=draw.choice([0.5, 1.0, 1.5]),
        slots=draw.choice([2, 4, 12]),
        load_s=draw.choice([0.1, 2.0, 40.0]),
        train_s=draw.choice([1.0, 10.0, 40.0]),
        drops=draw.choice([0.0, 0.0, 0.2, 0.4]),
        fails=draw.choice([0.0, 0.0, 0.2]),
        workers=draw.choice([1, 1, 2, 3]),
        worker_deaths=draw.choice([0, 0, 1, 3]),
        buffer_deaths=draw.choice([0, 0, 0, 2]),
        ends_short=draw.choice([0.0, 0.0, 0.3]) if mode is Mode.ASYNC and bound else 0.0,
        eval_interval=draw.choice([None, None, 3]),
        stops_at=draw.choice([None, None, num_steps // 2]),
        quarantines=draw.choice([0.0, 0.0, 0.1]),
        seed=seed,
    )


@cache
def options() -> Any:
    return compose(CORE_SECTIONS)


class TrialBuffer:
    """A Buffer that can be replaced by one that has its ledger alone. reports: of the selections, by step. leased: the
    version at the newest lease of each group."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        rows = folder / "rows.jsonl"
        if not rows.exists():
            rows.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(NUM_ROWS)))
        self._setting, self._path = setting, folder / f"{setting.seed}.sqlite"
        self._args: Any = options()(
            prompt_data=str(rows),
            rollout_batch_size=setting.groups_per_step,
            n_samples_per_prompt=setting.num_samples,
            eval_prompt_data=[f"held={rows}@[0:3]"],
            n_samples_per_eval_prompt=1,
        )
        self.reports: dict[int, RolloutReport] = {}
        self.leased: dict[GroupUid, int] = {}
        self.state = self.open()

    def open(self, *, restarted: bool = False, fresh: bool = False) -> BufferState:
        in_file = self._setting.buffer_deaths > 0
        if fresh:
            self._path.unlink(missing_ok=True)
        ledger = Ledger(self._path, run="run", keep_selected=True) if in_file else Ledger.in_memory()
        source = PromptDataSource(self._args)
        evals = EvalSource(self._args)
        self.state = BufferState(
            source,
            ledger=ledger,
            groups_per_step=self._setting.groups_per_step,
            eval_groups=lambda: evals.all_groups()[:3],
            schedule=self._setting.schedule,
            restarted=restarted,
        )
        return self.state

    def die(self) -> None:
        self.state.ledger.close()
        self.open(restarted=True)

    def get_samples(self, ticket: Ticket, num_samples: int) -> list[SampleGroup]:
        groups = self.state.get_samples(ticket, num_samples)
        if not ticket.evaluation:
            self.leased |= {group.uid: group.version or 0 for group in groups}
        return groups

    def go_back(self, saves: Saves) -> None:
        """Begin again, with the newest checkpoint if there is one."""
        self.state.ledger.close()
        self.open(fresh=True)
        self.reports = {step: report for step, report in self.reports.items() if step < saves.step}
        if saves.saved is not None:
            load_saved(self.state, saves.saved)
        known = entries(self.state.ledger)
        self.leased = {uid: version for uid, version in self.leased.items() if uid in known}

    def close_selection(self, rollout_id: int, last_ticket: int | None = None) -> Any:
        report, revision = self.state.close_selection(rollout_id, last_ticket)
        if report is not None:
            self.reports[rollout_id] = report
        return report, revision

    def end_and_close(self, ticket: Ticket) -> Any:
        return self.state.end_ticket(ticket), self.close_selection(ticket.rollout_id)[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)


class Saves:
    """Keeps the newest checkpoint."""

    def __init__(self, buffer: TrialBuffer) -> None:
        self._buffer = buffer
        self.step = 0
        self.saved: Mapping[str, Any] | None = None

    def save(self, step: int, owes_evaluation: bool = False) -> None:
        self.step, self.saved = step, saved_state(self._buffer.state)

    def save_next(self) -> None:
        pass

    def seal(self) -> None:
        pass


class Stopping(FakeTrain):
    """Fails once, in a step. A step that it streams has its selection by then; buffer: what has it."""

    buffer: TrialBuffer

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at = at
        self.step = 0

    def fetch(self, rollout_id: int) -> None:
        self.step = rollout_id

    def stream(self, rollout_id: int, models: Sequence[str], given: Sequence[str], gradients: bool) -> WorkReport:
        self.buffer.state.requeue_for_readers(f"train_{rollout_id}", "train")  # raises if there is none
        return super().stream(rollout_id, models, given, gradients)

    def finish_stream(self) -> Mapping[str, float]:
        self.step = self.streamed.pop()
        self.streamed.clear()  # what was lost
        return self.train()

    def train(self) -> Mapping[str, float]:
        if self.step == self.at:
            self.at = None
            raise TrainError("the run ends here")
        return super().train()


class Silent:
    def __init__(self) -> None:
        self.metrics: list[Mapping[str, float]] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append(metrics)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@dataclass(slots=True)
class Outcome:
    """What a run did. staleness: of every trained group. states: of every group that was ever leased. offered: the
    length of each group that was leased; leased: the version at its newest lease, without those that were first leased
    after the checkpoint that the run continued from; trained: the uids that were, with their steps; rejected: for good,
    or by a filter. seconds: virtual ones."""

    setting: Setting
    staleness: list[int] = field(default_factory=list)
    states: Counter[GroupState] = field(default_factory=Counter)
    offered: dict[GroupUid, float] = field(default_factory=dict)
    leased: dict[GroupUid, int] = field(default_factory=dict)
    trained: dict[GroupUid, int] = field(default_factory=dict)
    rejected: set[GroupUid] = field(default_factory=set)
    num_selected: int = 0
    seconds: float = 0.0
    metrics: list[Mapping[str, float]] = field(default_factory=list)


def run(setting: Setting, folder: Path) -> Outcome:
    """Run a setting to its end, through its deaths, and resumed from its newest checkpoint where it ends early."""
    outcome = Outcome(setting)
    buffer = TrialBuffer(folder, setting)
    saves, train = Saves(buffer), Stopping(setting.stops_at)
    while not _attempt(setting, buffer, saves, train, outcome):
        buffer.go_back(saves)
    for report in buffer.reports.values():
        outcome.staleness += report.staleness
        outcome.num_selected += report.num_groups
    for uid, entry in entries(buffer.state.ledger).items():
        outcome.states[entry.state] += 1
        if entry.state is GroupState.TRAINED:
            outcome.trained[uid] = int(entry.step or 0)
        elif entry.state in (GroupState.REJECTED, GroupState.QUARANTINED):
            outcome.rejected.add(uid)
    outcome.leased = buffer.leased
    buffer.state.ledger.close()
    return outcome


def _attempt(setting: Setting, buffer: TrialBuffer, saves: Saves, train: Stopping, outcome: Outcome) -> bool:
    runtime, driver, observer = world(setting, buffer, saves, train, outcome)
    try:
        driver.run()
    except TrainError:
        return False
    finally:
        outcome.seconds += runtime.now()
        outcome.metrics += observer.metrics
    return True


def world(
    setting: Setting,
    buffer: TrialBuffer,
    saves: Saves,
    train: Stopping,
    outcome: Outcome,
    changes: Mapping[str, Any] = MappingProxyType({}),
    stop: StopRequest | None = None,
) -> tuple[VirtualRuntime, Driver, Silent]:
    """A driver with its surroundings. changes: of its plan."""
    train.buffer = buffer
    runtime = VirtualRuntime({}, lambda role, method, args: {"train": setting.train_s, "save": 0.1}.get(method, 0.0))
    engines = VirtualEngines(runtime=runtime, slots=setting.slots, load_s=setting.load_s, version=saves.step)
    rollouts = VirtualRollouts(
        runtime=runtime,
        state=buffer,
        engines=engines,
        length=lambda uid, index: lognormal(Random(f"{setting.seed} {uid} {index}"), setting.sigma, 5.0, 80.0),
        drops=setting.drops,
        fails=setting.fails,
        num_workers=setting.workers,
        quarantines=setting.quarantines,
        gives_up=lambda ticket: Random(ticket.rollout_id).random() < setting.ends_short,
        seed=setting.seed,
        offered=outcome.offered,
    )
    selections = VirtualSelections(runtime=runtime, state=buffer)  # type: ignore[arg-type]
    runtime.roles |= {"buffer": buffer, "selection": selections, "rollout": rollouts, "train": train}
    runtime.roles |= {"publish": engines, "save": saves}
    _schedule_deaths(setting, runtime, rollouts, buffer)
    plan = RunPlan(
        num_rollouts=setting.num_steps,
        schedule=setting.schedule,
        first_rollout=saves.step,
        publish_at_start=saves.step > 0,
        roles=RolePlan(max_restarts=1000, stream_gradients=setting.schedule.by_window and setting.schedule.streams),
        evaluate=setting.eval_interval is not None,
        eval_interval=setting.eval_interval,
        saves=setting.stops_at is not None,
        save_interval=setting.stops_at,
        max_rollout_retries=1000,
        workers_per_ticket=setting.workers,
        rollout_timeout_s=1e6,
        train_timeout_s=1e6,
        publish_timeout_s=1e6,
        save_timeout_s=1e6,
        buffer_timeout_s=1e6,
    )
    observer = Silent()
    return runtime, Driver(replace(plan, **changes), runtime, observer, stop), observer  # type: ignore[arg-type]


def _schedule_deaths(setting: Setting, runtime: VirtualRuntime, rollouts: VirtualRollouts, buffer: TrialBuffer) -> None:
    draw = Random(f"deaths {setting.seed}")

    async def die(kill: Any, count: int) -> None:
        for _ in range(count):
            await runtime.loop.sleep_until(runtime.now() + draw.expovariate(1 / 40.0))
            kill()
            runtime.tell()

    runtime.loop.create_task(die(rollouts.die, setting.worker_deaths))
    runtime.loop.create_task(die(buffer.die, setting.buffer_deaths))


def check(outcome: Outcome) -> None:
    """No token is older than the bound, and each group has one fate; what was trained is what was selected."""
    setting = outcome.setting
    worst = max(outcome.staleness, default=0)
    assert worst <= setting.schedule.max_staleness, setting
    assert len(outcome.trained) == outcome.num_selected == outcome.states[GroupState.TRAINED], setting
    assert len(outcome.offered) >= len(outcome.trained)
    assert set(outcome.trained) <= set(outcome.offered)
    assert len(outcome.leased) == sum(outcome.states.values()), setting
    if not setting.ends_short:
        assert outcome.num_selected == setting.num_steps * setting.groups_per_step, setting
