"""Whole runs in virtual time, over the real driver and Buffer, with engines and a trainer of known cost.

A device is an engine with ``SLOTS`` places, or a part of the trainer. A response holds one for ``DECODED`` seconds a
token. Lengths are lognormal, by the seed of each sample: every mode generates the same responses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from schedule_bounds import response_length

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.readers import ALL_ROWS
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import PromptDataSource
from buffer_rl.driver.driver import Driver
from buffer_rl.options.section import compose
from buffer_rl.plan.schedule import Mode, RolePlan, RunPlan, Schedule
from buffer_rl.records.groups import GroupUid, RolloutReport, Ticket
from buffer_rl.rollout.requests import sampling_seed
from buffer_rl.testing.virtual_rollouts import VirtualEngines, VirtualRollouts, VirtualSelections
from buffer_rl.testing.virtual_time import VirtualRuntime

SLOTS = 8
GROUPS, SAMPLES = 16, 4
DECODED = 8e-3
TRAINED = 5e-5
PUBLISH = 0.2
SPLITS = (0.5, 0.625, 0.75)
SEED = 1234


def asynchronous(target: int, bound: int) -> Schedule:
    return Schedule(mode=Mode.ASYNC, target=target, max_staleness=bound)


MODES: Mapping[str, Schedule] = {
    "colocated lockstep": Schedule(mode=Mode.LOCKSTEP),
    "lockstep": Schedule(mode=Mode.LOCKSTEP),
    "one-step-off": Schedule(mode=Mode.ONE_STEP_OFF, target=1, max_staleness=1, drains=True),
    "async, S 1, M 1": asynchronous(1, 1),
    "async, S 1, M 2": asynchronous(1, 2),
    "async, S 2, M 2": asynchronous(2, 2),
    "async, S 2, M 4": asynchronous(2, 4),
    "async, S 4, M 4": asynchronous(4, 4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """slots: responses at a time. trained: seconds of a step for each of its tokens. groups: P. samples: of a group.
    decoded: seconds of a response for each of its tokens."""

    slots: int
    trained: float
    sigma: float
    groups: int = GROUPS
    samples: int = SAMPLES
    decoded: float = DECODED

    @classmethod
    def of(cls, mode: str, devices: int, engines: int, sigma: float) -> Costs:
        """Of a mode with so many engines; P grows with the number of devices."""
        colocated = mode == "colocated lockstep"
        groups = GROUPS * devices // 16
        trainers = devices if colocated else devices - engines
        slots = SLOTS * (devices if colocated else engines)
        return cls(slots=slots, trained=TRAINED * 16 / trainers, sigma=sigma, groups=groups)


@dataclass(slots=True, kw_only=True)
class Figures:
    """When each step of a run ended, the share of time in which the trainer waited, the staleness of each group, and
    seconds for which the trainer worked."""

    ends: list[float]
    idle: float
    staleness: list[int]
    worked: float = 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds a step, without the first fifth."""
        skipped = len(self.ends) // 5
        return (self.ends[-1] - self.ends[skipped]) / (len(self.ends) - 1 - skipped)


class Observer:
    """Notes when steps end, and how long each waited."""

    def __init__(self, runtime: VirtualRuntime) -> None:
        self._runtime = runtime
        self.ends: list[float] = []
        self.waited = 0.0
        self.staleness: list[int] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.ends.append(self._runtime.now())
        self.waited += metrics.get("perf/rollout_time", 0.0)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class NotedBuffer:
    """A Buffer that notes the staleness of every group of a selection that it closes."""

    def __init__(self, state: BufferState) -> None:
        self._state = state
        self.staleness: dict[int, list[int]] = {}

    def close_selection(self, rollout_id: int, last_ticket: int | None = None) -> tuple[RolloutReport | None, int]:
        report, revision = self._state.close_selection(rollout_id, last_ticket)
        if report is not None:
            self.staleness[rollout_id] = list(report.staleness)
        return report, revision

    def end_and_close(self, ticket: Ticket) -> tuple[RolloutReport, RolloutReport | None]:
        return self._state.end_ticket(ticket), self.close_selection(ticket.rollout_id)[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class KnownTrainer:
    """A trainer in virtual time: a step takes so long for each token of its rows."""

    def __init__(self, runtime: VirtualRuntime, state: BufferState, costs: Costs) -> None:
        self._runtime, self._state, self._costs = runtime, state, costs
        self._tokens = 0
        self.worked = 0.0

    def fetch(self, rollout_id: int) -> None:
        rows = [row for part in self._state.plan_data(rollout_id, ALL_ROWS).slices for row in part.row_ids]
        self._tokens = sum(tokens_of(row.uid, row.sample_index, self._costs.sigma) for row in rows)

    async def train(self) -> Mapping[str, float]:
        seconds = self._costs.trained * self._tokens
        self.worked += seconds
        await self._runtime.loop.sleep_until(self._runtime.now() + seconds)
        return {}

    def discard(self) -> None:
        pass


@cache
def tokens_of(uid: GroupUid, index: int, sigma: float) -> int:
    """The length of a sample's response."""
    return response_length(sampling_seed(SEED, uid, index), sigma)


def virtual(mode: str, costs: Costs, num_steps: int, data: Path) -> Figures:
    """A run in virtual time."""
    args: Any = compose(CORE_SECTIONS)(
        prompt_data=str(data), rollout_batch_size=costs.groups, n_samples_per_prompt=costs.samples, seed=SEED
    )
    schedule = MODES[mode]
    state = BufferState(
        PromptDataSource(args), ledger=Ledger.in_memory(), groups_per_step=costs.groups, schedule=schedule
    )
    runtime = VirtualRuntime({})
    engines = VirtualEngines(runtime=runtime, slots=costs.slots, load_s=PUBLISH)
    rollouts = VirtualRollouts(
        runtime=runtime,
        state=state,
        engines=engines,
        length=lambda uid, index: costs.decoded * tokens_of(uid, index, costs.sigma),
    )
    noted = NotedBuffer(state)
    selections = VirtualSelections(runtime=runtime, state=noted)  # type: ignore[arg-type]
    runtime.roles |= {"buffer": noted, "selection": selections, "rollout": rollouts, "publish": engines}
    trainer = runtime.roles["train"] = KnownTrainer(runtime, state, costs)
    limits = dict.fromkeys(("rollout", "train", "publish", "save", "buffer"), 1e9)
    plan = RunPlan(
        num_rollouts=num_steps,
        schedule=schedule,
        roles=RolePlan(),
        **{f"{name}_timeout_s": limit for name, limit in limits.items()},  # type: ignore[arg-type]
    )
    observer = Observer(runtime)
    Driver(plan, runtime, observer).run()  # type: ignore[arg-type]
    staleness = [value for values in noted.staleness.values() for value in values]
    idle = observer.waited / observer.ends[-1]
    return Figures(ends=observer.ends, idle=idle, staleness=staleness, worked=trainer.worked)


def best_split(mode: str, devices: int, sigma: float, num_steps: int, data: Path) -> tuple[int, Figures]:
    """The number of engines with which the mode is fastest, and its figures."""
    if mode == "colocated lockstep":
        return devices, virtual(mode, Costs.of(mode, devices, devices, sigma), num_steps, data)
    tried = {
        engines: virtual(mode, Costs.of(mode, devices, engines, sigma), num_steps, data)
        for engines in (round(devices * split) for split in SPLITS)
    }
    engines = min(tried, key=lambda number: tried[number].step_s)
    return engines, tried[engines]


def write_rows(folder: Path) -> Path:
    """Prompts that are all different."""
    rows = folder / "train.jsonl"
    if not rows.exists():
        rows.write_text("".join(json.dumps({"prompt": f"{number:06d}", "label": ""}) + "\n" for number in range(4096)))
    return rows
