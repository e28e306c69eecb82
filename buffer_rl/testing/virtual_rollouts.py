"""Rollouts, engines and selections of a ``VirtualRuntime``, over a real ``BufferState``.

Engines have slots; a response holds one for as long as it is, and longer by every publication in its time. So the
groups of several tickets interleave as those of a real run do, and days of a schedule pass in seconds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from buffer_rl.buffer.state import BufferState
from buffer_rl.errors import WorkerDiedError
from buffer_rl.records.groups import GroupUid, RolloutReport, SampleGroup, Ticket
from buffer_rl.testing.virtual_time import VirtualRuntime


def lognormal(rng: Random, sigma: float, mean: float, cap: float = math.inf) -> float:
    """A draw with this mean, before it is cut off at ``cap``. sigma: of its logarithm."""
    return min(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma), cap)


@dataclass(slots=True, kw_only=True)
class VirtualEngines:
    """The role ``publish``, and what responses wait for.

    slots: responses at a time. load_s: seconds of a publication, in which no token is generated.
    """

    runtime: VirtualRuntime
    slots: int
    load_s: float = 0.0
    version: int = 0
    busy_s: float = 0.0
    _paused_s: float = 0.0
    _resumed: asyncio.Event | None = None
    _places: asyncio.Semaphore | None = None

    async def publish(self, version: int) -> dict[str, float]:
        """Retract what runs; it continues with the new weights."""
        self._resumed = asyncio.Event()
        await self._sleep(self.load_s)
        self._paused_s += self.load_s
        self.version = version
        self._resumed.set()
        self._resumed = None
        return {}

    async def respond(self, length: float) -> tuple[int, int]:
        """One response of ``length`` seconds. Returns the oldest and the newest version of its tokens."""
        if self._places is None:
            self._places = asyncio.Semaphore(self.slots)
        async with self._places:
            if self._resumed is not None:
                await self._resumed.wait()
            oldest, left = self.version, length
            self.busy_s += length
            while left > 1e-9:
                began, paused = self.runtime.now(), self._paused_s
                await self._sleep(left)
                if self._resumed is not None:  # a part of the time was in the pause
                    await self._resumed.wait()
                left -= self.runtime.now() - began - (self._paused_s - paused)
            return oldest, self.version

    async def _sleep(self, seconds: float) -> None:
        await self.runtime.loop.sleep_until(self.runtime.loop.time() + seconds)


@dataclass(slots=True, kw_only=True)
class VirtualRollouts:
    """The role ``rollout``: leases, generates, filters and finishes groups, several tickets at a time.

    num_workers: they get the tickets in turn, and die in turn. length: seconds of the response of a group's sample.
    drops, fails, quarantines: shares of groups that a filter drops, of attempts that fail and are requeued, and of
    groups that are quarantined. gives_up: whether a ticket replaces no group that was dropped, but for its first one.
    offered: the length of each group that was ever leased.
    """

    runtime: VirtualRuntime
    state: Any
    engines: VirtualEngines
    length: Callable[[GroupUid, int], float]
    drops: float = 0.0
    fails: float = 0.0
    quarantines: float = 0.0
    gives_up: Callable[[Ticket], bool] = lambda ticket: False
    num_workers: int = 1
    seed: int = 0
    restarts: int = 0
    offered: dict[GroupUid, float] = field(default_factory=dict)
    _turn: int = 0
    _num_deaths: int = 0
    _deaths: list[asyncio.Event] = field(default_factory=list)  # of each worker

    def __post_init__(self) -> None:
        self._deaths = [asyncio.Event() for _ in range(self.num_workers)]

    async def run(self, ticket: Ticket) -> Any:
        """Produce the groups of a ticket. Raises WorkerDiedError if the worker is dead, or dies meanwhile."""
        died = self._deaths[self._turn % self.num_workers]
        self._turn += 1
        if not ticket.num_groups:
            return {}, []
        work = [asyncio.ensure_future(self._slot(ticket, is_first=not n)) for n in range(ticket.num_groups)]
        death = asyncio.ensure_future(died.wait())
        try:
            waiting = asyncio.wait(work, return_when=asyncio.FIRST_EXCEPTION)
            finished: asyncio.Future[Any] = asyncio.ensure_future(waiting)
            await asyncio.wait([finished, death], return_when=asyncio.FIRST_COMPLETED)
            if died.is_set():
                raise WorkerDiedError("the process died", where="rollout.run")
            for slot in work:
                if slot.done():
                    slot.result()
        finally:
            for task in (*work, death):
                task.cancel()
            await asyncio.gather(*work, death, finished, return_exceptions=True)
        return ({"eval/held": 0.0} if ticket.evaluation else {"rollout/raw_reward": 1.0}), []

    def die(self) -> None:
        """End a worker, with all tickets that it runs."""
        self._deaths[self._num_deaths % self.num_workers].set()
        self._num_deaths += 1

    def restart(self) -> None:
        """Another worker for each dead one."""
        self.restarts += 1
        self._deaths = [asyncio.Event() if death.is_set() else death for death in self._deaths]

    async def _slot(self, ticket: Ticket, *, is_first: bool) -> None:
        while True:
            groups = self.state.get_samples(ticket, 1)
            if not groups:
                return
            (group,) = groups
            rng = Random(f"{self.seed} {group.uid}")
            lengths = [self.length(group.uid, sample.sample_index) for sample in group]
            if not ticket.evaluation:
                self.offered[group.uid] = sum(lengths)
            versions = await self._responses(group, lengths)
            kept = self._report(ticket, group, versions, rng)
            self.runtime.tell()
            if kept or (self.gives_up(ticket) and not is_first):
                return

    async def _responses(self, group: SampleGroup, lengths: list[float]) -> list[tuple[int, int]]:
        """The oldest and the newest version of the tokens of each response."""
        return await asyncio.gather(*(self.engines.respond(length) for length in lengths))

    def _report(self, ticket: Ticket, group: SampleGroup, versions: list[tuple[int, int]], rng: Random) -> bool:
        if not ticket.evaluation:
            if rng.random() < self.drops:
                self.state.reject(ticket, group.uid, group.attempt, "dull")
                return False
            if group.attempt < 4 and Random(f"{self.seed} {group.uid} {group.attempt}").random() < self.fails:
                self.state.add_samples(ticket, [(group.uid, group.attempt)])
                return False
            if Random(f"{self.seed} {group.uid} spoilt").random() < self.quarantines:
                self.state.quarantine(ticket, group.uid, group.attempt, "broken")
                return False
        columns = {
            "tokens": [np.asarray([1, 2], dtype=np.int32) for _ in group],
            "response_length": np.ones(len(group), dtype=np.int32),
            "loss_mask": [np.ones(1, dtype=np.float32) for _ in group],
            "reward": np.ones(len(group), dtype=np.float32),
            "weight_version": np.asarray([oldest for oldest, _ in versions], dtype=np.int32),
        }
        self.state.finish(ticket, group.uid, group.attempt, [sample.row_id for sample in group], columns)
        return True


@dataclass(slots=True, kw_only=True)
class VirtualSelections:
    """The role ``selection``. reports: of each selection that was closed, by its step."""

    runtime: VirtualRuntime
    state: BufferState
    reports: dict[int, RolloutReport] = field(default_factory=dict)

    async def await_selection(self, rollout_id: int, last_ticket: int) -> RolloutReport:
        """Close the selection once its groups are finished."""
        while True:
            report, _ = self.state.close_selection(rollout_id, last_ticket)
            if report is not None:
                self.reports[rollout_id] = report
                return report
            await self.runtime.until_changed()
