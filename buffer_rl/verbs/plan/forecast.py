"""Whole runs in virtual time with the costs of a recorded one, over the real driver, Buffer and schedules.

Processes: each engine, the rollout worker that scores groups, the trainer with all its ranks, and one for the fixed
parts of steps, whose work delays others only where cores are shared.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import PromptDataSource
from buffer_rl.driver.driver import Driver
from buffer_rl.observe.costs import Costs, Recorded, Shape
from buffer_rl.observe.timeline import WorkReport, WorkSpan
from buffer_rl.plan.roles import ACTOR, FIELD_OF_MODEL
from buffer_rl.plan.schedule import RolePlan, RunPlan, Schedule
from buffer_rl.records.groups import GroupUid, RolloutReport, SampleGroup, Ticket
from buffer_rl.testing.virtual_machine import BatchingEngines, Machine, Process
from buffer_rl.testing.virtual_rollouts import VirtualRollouts, VirtualSelections
from buffer_rl.testing.virtual_time import VirtualRuntime

NUM_PROMPTS = 4096
WITHOUT_LIMIT = 1e12
ROUNDS, FURTHEST = 4, 4.0
"""Of ``calibrated``: runs at most, and by how much a round changes costs at most."""
OF_GENERATION = ("decode_step", "decode_token", "score", "ticket")
OF_TRAINING = ("update_fixed", "update_token", "forward_token")
"""The costs that a round of ``calibrated`` changes together."""
_TIMEOUTS = [f"{what}_timeout_s" for what in ("rollout", "train", "publish", "save", "buffer")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Shape):
    """A configuration. slots: requests that an engine decodes together. cores: that all processes share, None if each
    has a device of its own. others: processes of other work on the machine, always busy. streams_gradients:
    ``--stream-gradients``."""

    schedule: Schedule
    slots: int
    cores: float | None = None
    others: float = 0.0
    streams_gradients: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Means over the steps but the first fifth. tokens: response tokens trained on, a step. engines_busy, trainer_busy:
    shares of time. others_busy: cores that other work had. staleness: of each group that was trained on."""

    setup: Setup
    step_s: float
    tokens: float
    ticket_s: float
    update_s: float
    engines_busy: float
    trainer_busy: float
    others_busy: float = 0.0
    staleness: Sequence[int] = ()

    @property
    def tokens_per_s(self) -> float:
        """Trained response tokens per second."""
        return self.tokens / self.step_s if self.step_s > 0 else 0.0


def drawn_lengths(recorded: Sequence[Sequence[int]]) -> Callable[[GroupUid, int], int]:
    """Tokens of a response by its group and index: each group is drawn, by its uid, from those of a recorded run."""

    @cache
    def group(uid: GroupUid) -> Sequence[int]:
        return Random(f"{uid}").choice(recorded)

    return lambda uid, index: group(uid)[index % len(group(uid))]


@dataclass(slots=True, kw_only=True)
class _Rollouts(VirtualRollouts):
    """Requests in the batches of engines, then the scores of one group after another. kept: tokens of the groups that
    each ticket has finished."""

    batches: BatchingEngines
    worker: Process
    host: Process
    costs: Costs
    kept: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _scoring: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, ticket: Ticket) -> Any:
        await self.host.work(self.costs.ticket)
        return await VirtualRollouts.run(self, ticket)

    async def _responses(self, group: SampleGroup, lengths: list[float]) -> list[tuple[int, int]]:
        versions = await self.batches.respond_all(lengths)
        async with self._scoring:
            await self.worker.work(self.costs.score)
        return versions

    def _report(self, ticket: Ticket, group: SampleGroup, versions: list[tuple[int, int]], rng: Random) -> bool:
        is_kept = VirtualRollouts._report(self, ticket, group, versions, rng)
        if is_kept:
            self.kept[ticket.rollout_id].append(sum(self.length(group.uid, s.sample_index) for s in group))
        return is_kept


@dataclass(slots=True, kw_only=True)
class _Trainer:
    """The role ``train``: ranks that share the tokens of a step of ``rollouts``. tokens: of each step."""

    rollouts: _Rollouts
    process: Process
    setup: Setup
    tokens: list[float] = field(default_factory=list)

    async def fetch(self, rollout_id: int) -> None:
        rows = [row for part in self.rollouts.state.plan_data(rollout_id).slices for row in part.row_ids]
        self.tokens.append(sum(self.rollouts.length(row.uid, row.sample_index) for row in rows))
        await self.rollouts.host.work(self.rollouts.costs.prepare)

    async def log_probs(self, model: str, rollout_id: int | None, writes: bool) -> None:
        if rollout_id is not None:
            await self.fetch(rollout_id)
        await self._work(self.rollouts.costs.forward_token * self.tokens[-1])

    async def train(self) -> Mapping[str, float]:
        await self._work(self.rollouts.costs.update_token * self.tokens[-1], self.rollouts.costs.update_fixed)
        return {}

    async def stream(self, rollout_id: int, models: Sequence[str], given: Sequence[str], gradients: bool) -> WorkReport:
        """Passes over each group of a ticket once it is finished, and with ``gradients`` forward and backward."""
        of_token = len(models) * self.rollouts.costs.forward_token + gradients * self.rollouts.costs.update_token
        done = 0
        while done < self.setup.groups:
            finished = self.rollouts.kept[rollout_id][done:]
            if not finished:
                await self.rollouts.runtime.until_changed()
                continue
            done += len(finished)
            await self._work(of_token * sum(finished))
        if gradients:
            self.tokens.append(sum(self.rollouts.kept[rollout_id]))
        return WorkReport()

    async def finish_stream(self) -> Mapping[str, float]:
        await self._work(0.0, self.rollouts.costs.update_fixed)
        return {}

    def discard(self) -> None:
        """Nothing to forget."""

    async def _work(self, shared: float, fixed: float = 0.0) -> None:
        await self.process.work(fixed + shared / self.setup.ranks)


class _Observer:
    """Notes when steps end, and how long tickets and updates take."""

    def __init__(self, runtime: VirtualRuntime) -> None:
        self._runtime = runtime
        self.ends: list[float] = []
        self.seconds: dict[str, list[float]] = defaultdict(list)  # of the spans of each name

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.ends.append(self._runtime.now())

    def worked(self, role: str, spans: Sequence[WorkSpan]) -> None:
        for span in spans:
            self.seconds[span.name].append(span.seconds)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class _NotedBuffer:
    """A Buffer that notes the staleness of each group that is selected, and adds the rest of a step."""

    def __init__(self, state: BufferState, host: Process, rest: float) -> None:
        self._state, self._host, self._rest = state, host, rest
        self.staleness: list[int] = []

    def close_selection(self, rollout_id: int, last_ticket: int | None = None) -> tuple[RolloutReport | None, int]:
        report, revision = self._state.close_selection(rollout_id, last_ticket)
        if report is not None:
            self.staleness += report.staleness
        return report, revision

    def end_and_close(self, ticket: Ticket) -> tuple[RolloutReport, RolloutReport | None]:
        return self._state.end_ticket(ticket), self.close_selection(ticket.rollout_id)[0]

    async def commit(self, rollout_id: int, step: int) -> None:
        self._state.commit(rollout_id, step)
        await self._host.work(self._rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def forecast(recorded: Recorded, costs: Costs, setup: Setup, num_steps: int, prompts: Path) -> Forecast:
    """A run of so many steps in virtual time. prompts: a file of ``write_prompts``."""
    runtime = VirtualRuntime({})
    machine = Machine(runtime=runtime, cores=setup.cores, others=setup.others)
    host = machine.process(float)
    engines = BatchingEngines(
        machine=machine,
        decode=lambda n: costs.decode_step + costs.decode_token * n,
        count=setup.engines,
        slots=setup.slots,
        host=host,
        publish_s=costs.publish,
        pause_s=costs.pause,
    )
    noted = _NotedBuffer(_buffer(setup, prompts), host, costs.rest)
    rollouts = _Rollouts(
        runtime=runtime,
        state=noted,
        engines=SimpleNamespace(),  # type: ignore[arg-type]
        length=drawn_lengths(recorded.lengths),
        drops=recorded.drops,
        batches=engines,
        worker=machine.process(float),
        host=host,
        costs=costs,
    )
    trainer = _Trainer(rollouts=rollouts, process=machine.process(float, weight=setup.ranks), setup=setup)
    selections = VirtualSelections(runtime=runtime, state=noted)  # type: ignore[arg-type]
    runtime.roles |= {"buffer": noted, "selection": selections, "rollout": rollouts, "publish": engines, ACTOR: trainer}
    observer = _Observer(runtime)
    Driver(_plan(recorded, setup, num_steps), runtime, observer).run()  # type: ignore[arg-type]
    skipped, whole = num_steps // 5, observer.ends[-1]
    return Forecast(
        setup=setup,
        step_s=(whole - observer.ends[skipped]) / (num_steps - 1 - skipped),
        tokens=fmean(trainer.tokens[skipped + 1 :]),
        ticket_s=fmean(observer.seconds["rollout"][1:]),
        update_s=fmean(observer.seconds["update"][1:]),
        engines_busy=fmean(engine.busy_s for engine in engines.engines) / whole,
        trainer_busy=trainer.process.busy_s / whole,
        others_busy=machine.others_s / whole,
        staleness=noted.staleness,
    )


def calibrated(recorded: Recorded, setup: Setup, num_steps: int, prompts: Path) -> Costs:
    """The costs with which tickets and updates of the recorded configuration take as long in virtual time as they took.

    setup: of the recorded run. What it measured includes what its processes took from each other on shared cores, and
    tickets that share engines; costs are those of processes alone.
    """
    costs = recorded.costs
    for _ in range(ROUNDS):
        found = forecast(recorded, costs, setup, num_steps, prompts)
        generation, training = _ratio(recorded.ticket_s, found.ticket_s), _ratio(recorded.update_s, found.update_s)
        factors = dict.fromkeys(OF_GENERATION, generation) | dict.fromkeys(OF_TRAINING, training)
        costs = replace(costs, **{name: getattr(costs, name) * factor for name, factor in factors.items()})
        if max(abs(generation - 1.0), abs(training - 1.0)) < 0.01:
            break
    return costs


def write_prompts(folder: Path) -> Path:
    """Prompts that are all different, for ``forecast``."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number:06d}"}) + "\n" for number in range(NUM_PROMPTS)))
    return path


def _ratio(measured: float, found: float) -> float:
    return min(FURTHEST, max(1 / FURTHEST, measured / found)) if measured > 0 and found > 0 else 1.0


def _buffer(setup: Setup, prompts: Path) -> BufferState:
    from buffer_rl.args import CORE_SECTIONS
    from buffer_rl.options.section import compose

    args: Any = compose(CORE_SECTIONS)(
        prompt_data=str(prompts), rollout_batch_size=setup.groups, n_samples_per_prompt=setup.samples
    )
    source, ledger = PromptDataSource(args), Ledger.in_memory()
    return BufferState(source, ledger=ledger, groups_per_step=setup.groups, schedule=setup.schedule)


def _plan(recorded: Recorded, setup: Setup, num_steps: int) -> RunPlan:
    models = {name: model for model, name in FIELD_OF_MODEL.items()}
    passes = tuple((ACTOR, models[name]) for name in recorded.passes)
    roles = RolePlan(passes=passes, stream_gradients=setup.streams_gradients)
    timeouts: dict[str, Any] = dict.fromkeys(_TIMEOUTS, WITHOUT_LIMIT)
    return RunPlan(num_rollouts=num_steps, schedule=setup.schedule, roles=roles, **timeouts)
