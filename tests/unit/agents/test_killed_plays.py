"""Rollout workers that die in every phase of a turn, 30 times each: what is played again has the same answers.

Sessions, plays, gateway, journal and agents are the real ones. A death is simulated: at its moment the file of the
journal is copied, as ``kill -9`` would leave it. What the old worker does afterwards reaches nobody, and a new worker
goes on with the copy. Each answer of the engine has log-probabilities of its own, so that a sample shows which answers
it has.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.agents.journal import FILE_NAME, Journal
from buffer_rl.agents.play import Agents, play
from buffer_rl.agents.session import AgentKilledError
from buffer_rl.engines.client import GenerateResult
from buffer_rl.records.groups import RowId, Sample, SampleGroup
from buffer_rl.rollout.context import RolloutContext, RunStart
from buffer_rl.rollout.generate import sampling_params_for
from buffer_rl.rollout.lease import Lease
from buffer_rl.rollout.production import generate_group
from buffer_rl.rollout.requests import Requests
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.testing.fake_buffer import FakeBuffer
from harness.agent_play import AgentEngine, context_of, make_groups, make_ticket, user

PHASES = ("before the request", "while it is sampled", "journalled", "between turns", "returned", "before the finish")
KILLS = 30
START = RunStart(name="first", version=3, origin="here:3")
TURNS = 5
Row = tuple[list[int], list[int] | None, list[float] | None]


class CountingEngine(AgentEngine):
    """Answers with a digit that the seed gives, and counts its answers in their log-probabilities."""

    def __init__(self, world: World) -> None:
        super().__init__(self._digit)
        self._world = world
        self.answered = 0
        self.seeds_of: Counter[int] = Counter()

    async def _digit(self, prompt: str, params: dict[str, Any]) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        self._world.reach("while it is sampled")
        await asyncio.sleep(0)
        self.seeds_of[params["sampling_seed"]] += 1
        return str(params["sampling_seed"] % 10)

    def result(self, ids: Sequence[int], reason: str) -> GenerateResult:
        self.answered += 1
        return replace(super().result(ids, reason), log_probs=[-float(self.answered)] * len(ids))


@dataclass
class World:
    """What outlives a worker. kill_at: at which point of which phase, counted from 1, the worker dies; 0: never.

    finished: the groups, each reported by the worker that lived. folder: of the newest worker."""

    folder: Path
    kill_at: tuple[str, int] = ("", 0)
    version: int = 3
    finished: dict[Any, SampleGroup] = field(default_factory=dict)
    reached: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    is_dead: bool = False

    def __post_init__(self) -> None:
        self.engine = CountingEngine(self)

    def reach(self, phase: str) -> None:
        """A point of the worker's life, in any of its threads."""
        self.reached[phase] += 1
        if not self.is_dead and self.kill_at == (phase, self.reached[phase]):
            self.is_dead = True
            after = self.folder.with_name(f"life{self.lives + 1}")
            after.mkdir()
            with sqlite3.connect(self.folder / FILE_NAME) as old, sqlite3.connect(after / FILE_NAME) as new:
                old.backup(new)
            self.folder = after

    async def agent(self, args: Any, sample: Sample, session: Any) -> float:
        """Asks, has two sub-agents ask at once, one of them under a name, and goes on with their answers."""

        async def ask(messages: list[dict[str, Any]], **options: Any) -> str:
            self.reach("before the request")
            message = await session.chat(messages, **options)
            self.reach("between turns")
            return str(message["content"])

        text = await ask(user(f"{sample.sample_index}"))
        parts = await asyncio.gather(ask(user(f"sub{text}")), ask(user(f"sub{text}"), call="two"))
        messages = [*user("sum"), {"role": "assistant", "content": text}, *user("+".join(sorted(parts)))]
        await ask(messages)
        await ask(messages)
        return 1.0

    async def live(self) -> None:
        """One worker, until all groups are finished or it dies."""
        work = asyncio.ensure_future(self.work())
        while not (work.done() or self.is_dead):
            await asyncio.wait({work}, timeout=0.002)
        if not self.is_dead:
            await work
        work.cancel()
        await asyncio.wait({work})

    async def live_again(self, kill_at: tuple[str, int] = ("", 0)) -> None:
        """The worker after one that died."""
        assert self.is_dead
        self.kill_at, self.is_dead, self.lives = kill_at, False, self.lives + 1
        self.reached.clear()
        await self.live()

    async def work(self) -> None:
        """One worker."""
        async with context_of(self.engine, self.agent, run_dir=self.folder, start=START) as context:
            own = self.lives

            async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
                played = await play(args, sample, sampling_params)
                self.reach("returned")
                return played

            context.generate = generate
            await asyncio.gather(*(self.one(context, group, own) for group in make_groups(2, 2)))
            if not self.is_dead:
                self.counts.update({name: int(n) for name, n in context.counts["train_0"].items()})

    async def one(self, context: RolloutContext, group: SampleGroup, own: int) -> None:
        if group.uid in self.finished:
            return
        group = replace(group, version=self.version, attempt=own + 1)
        lease = Lease.of(context, FakeBuffer([group], make_ticket(1)), group, Requests())
        await generate_group(lease, sampling_params_for(context.args, evaluation=False), RolloutStats())
        self.reach("before the finish")
        if not self.is_dead and own == self.lives:
            assert group.uid not in self.finished
            self.finished[group.uid] = group

    def recorded(self) -> set[float]:
        """The log-probabilities of the turns that the file has, which are the engine's answers."""
        with sqlite3.connect(self.folder / FILE_NAME) as file:
            return {memoryview(found).cast("d")[0] for (found,) in file.execute("SELECT log_probs FROM turns")}

    def rows(self) -> dict[RowId, Row]:
        return {
            row.row_id: (row.tokens, row.loss_mask, row.rollout_log_probs)
            for group in self.finished.values()
            for row in group.rows
        }


def tokens(rows: dict[RowId, Row]) -> dict[RowId, Any]:
    """Without the log-probabilities, which count the engine's answers."""
    return {name: row[:2] for name, row in rows.items()}


def answers(rows: dict[RowId, Row]) -> Counter[float]:
    """How many sampled tokens each answer has in the rows."""
    return Counter(p for _, mask, found in rows.values() for m, p in zip(mask or [], found or [], strict=True) if m)


pytestmark = pytest.mark.filterwarnings("ignore:coroutine")  # of agents whose loop is stopped


@pytest.fixture(autouse=True)
def a_point_behind_the_journal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each turn that is written reaches a point of the world that the file is of."""
    write = Journal.record

    def record(self: Journal, *values: Any) -> None:
        write(self, *values)
        if (world := WORLDS.get(str(self._path.parents[1]))) is not None:
            world.reach("journalled")

    monkeypatch.setattr(Journal, "record", record)
    yield
    WORLDS.clear()
    gc.collect()  # so that what dead workers left is not found in the next test


WORLDS: dict[str, World] = {}


def world_in(folder: Path, **options: Any) -> World:
    (folder / "life0").mkdir(parents=True)
    world = WORLDS[str(folder)] = World(folder / "life0", **options)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
async def test_after_a_death_in_any_phase_each_recorded_turn_is_played_again_as_it_was(
    phase: str, tmp_path: Path
) -> None:
    whole = world_in(tmp_path / "whole")
    await whole.live()
    expected, points = whole.rows(), whole.reached[phase]
    assert len(answers(expected)) == whole.engine.answered == 4 * TURNS
    rng = random.Random(phase)

    async def one(number: int) -> float:
        world = world_in(tmp_path / str(number), kill_at=(phase, rng.randint(1, points)))
        await world.live()
        recorded, finished = world.recorded(), set(answers(world.rows()))
        await world.live_again()
        found = world.rows()
        assert tokens(found) == tokens(expected)
        trained = answers(found)
        assert len(trained) == 4 * TURNS  # each sampled token once, of one answer
        assert set(trained.values()) == {2}
        assert recorded | finished <= set(trained)
        assert "agent/failed" not in world.counts
        assert world.counts["agent/replayed"] == len(recorded - finished)
        return world.counts["agent/replayed"]

    assert sum(await asyncio.gather(*map(one, range(KILLS)))) > KILLS


async def test_the_second_death_in_one_play_counts_as_its_own_and_the_next_play_is_a_new_one(tmp_path: Path) -> None:
    whole = world_in(tmp_path / "whole")
    await whole.live()
    world = world_in(tmp_path / "world", kill_at=("journalled", 3))
    await world.live()
    await world.live_again(("journalled", 3))
    before = world.recorded()
    await world.live_again()
    found = world.rows()
    assert len(answers(found)) == 4 * TURNS
    assert (world.counts["agent/killed"], world.counts["agent/failed"], world.counts["agent/replayed"]) == (4, 4, 0)
    assert not before & set(answers(found))
    assert tokens(found) != tokens(whole.rows())
    assert max(world.engine.seeds_of.values()) <= 2


async def test_turns_of_another_version_than_the_one_at_the_lease_are_not_replayed(tmp_path: Path) -> None:
    world = world_in(tmp_path / "world", kill_at=("returned", 2))
    await world.live()
    before, finished = world.recorded(), set(answers(world.rows()))
    world.version = world.engine.version = 4
    await world.live_again()
    assert world.counts["agent/replayed"] == 0
    assert (before - finished) & set(answers(world.rows())) == set()
    assert len(answers(world.rows())) == 4 * TURNS


async def test_an_agent_that_is_killed_is_played_again_and_at_the_second_time_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills: Counter[RowId] = Counter()
    outcome = Agents._outcome

    def killed(self: Agents, task: Any, session: Any, prompt: Sample) -> Any:
        kills[prompt.row_id] += 1
        if kills[prompt.row_id] <= wanted.get(prompt.row_id, 0):
            raise AgentKilledError("signal 9")
        return outcome(self, task, session, prompt)

    whole = world_in(tmp_path / "whole")
    await whole.live()
    once, twice, *others = sorted(name for name in whole.rows() if name.part == 0)
    wanted = {once: 1, twice: 2}
    monkeypatch.setattr(Agents, "_outcome", killed)
    world = world_in(tmp_path / "world")
    await world.live()
    found, expected = tokens(world.rows()), tokens(whole.rows())
    assert [found[name] == expected[name] for name in (once, twice, *others)] == [True, False, *[True] * len(others)]
    assert (world.counts["agent/killed"], world.counts["agent/failed"], world.counts["agent/replayed"]) == (3, 1, TURNS)
    assert world.engine.answered == 5 * TURNS


async def test_after_a_failed_attempt_siblings_are_replayed_and_what_failed_is_played_anew(tmp_path: Path) -> None:
    world = world_in(tmp_path / "world")
    plays: Counter[RowId] = Counter()

    async def fails(args: Any, sample: Sample, session: Any) -> float:
        reward = await World.agent(world, args, sample, session)
        plays[sample.row_id] += 1
        if (sample.row_id.uid.row, sample.sample_index) == (0, 1) and plays[sample.row_id] <= 2:
            raise ValueError("no")
        return reward

    world.agent = fails  # type: ignore[method-assign]
    with pytest.raises(Exception, match="no"):
        await world.live()
    world.is_dead = True
    first = world.engine.answered
    await world.live_again()
    assert len(answers(world.rows())) == 4 * TURNS
    assert world.counts["agent/replayed"] >= TURNS
    assert "agent/killed" not in world.counts  # siblings were cancelled
    assert max(world.engine.seeds_of.values()) <= 2
    assert first < world.engine.answered
