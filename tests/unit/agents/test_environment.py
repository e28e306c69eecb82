"""The built-in agent of environments: plays, seeds, rewards, and what becomes of one that misbehaves."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from buffer_rl.agents import environment as module
from buffer_rl.agents import play
from buffer_rl.agents.options import AgentOptions
from buffer_rl.agents.tools import check_environment, tools_of
from buffer_rl.cli import main
from buffer_rl.errors import ConfigError, RolloutError
from buffer_rl.kinds.agent import GiveUp
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Sample, Status
from buffer_rl.rollout.conversion import GroupConverter
from harness.agent_play import AgentEngine, make_args, roll
from harness.processes import holds_within, is_running

HERE = Path(__file__)
FOREVER_S = 600.0


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for of, name, seconds in (
        (play, "GRACE_S", 0.1),
        (play, "STOPPED_S", 0.05),
        (module, "FREE_S", 0.2),
        (module, "CLOSE_S", 0.3),
    ):
        monkeypatch.setattr(of, name, seconds)
    yield
    Misbehaves.released.set()
    Misbehaves.released = threading.Event()


async def played(name: str, engine: AgentEngine | None = None, **options: Any) -> tuple[Any, dict[str, float]]:
    """The rollout of an environment of this file, and the metrics of agents."""
    options = {"environment": f"{__name__}:{name}", **options}
    fake, metrics = await roll(None, engine or AgentEngine(), **options)
    return fake, {name.removeprefix("agent/"): value for name, value in metrics.items() if name.startswith("agent/")}


class Counter3:
    """Ends at the third step; each gives a half."""

    def reset(self) -> str:
        self.number = 0
        return "start"

    def step(self, action: str) -> Any:
        self.number += 1
        return f"{action}{self.number}", 0.5, self.number == 3


class Asynchronous(Counter3):
    """The same with other forms of what a method may be and return."""

    def __init__(self, args: Any) -> None:
        assert args.environment.endswith("Asynchronous")

    async def reset(self) -> Any:  # type: ignore[override]
        self.loop = asyncio.get_running_loop()
        return [{"role": "user", "content": super().reset()}]

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is self.loop
        observation, reward, done = super().step(action)
        return {"role": "user", "content": observation}, reward, False, done, {}


async def test_with_turn_rewards_each_step_has_its_reward_at_its_answer() -> None:
    """Three steps of a half each; the last answer has what is left, which is nothing but its own."""
    on = {"turn_rewards": True, "advantage_estimator": "reinforce_plus_plus"}
    fake, _ = await played("Counter3", **on)
    (group,) = fake.finished
    for sample in group:
        rewards = [reward for _, reward in sample.turn_rewards]
        assert (rewards, sample.reward) == ([0.5, 0.5, 0.5, -1.5], 1.5)
        ends = [place for place, _ in sample.turn_rewards]
        assert ends[-1] == ends[-2] == sample.response_length - 1


async def test_an_environment_is_stepped_with_each_answer_until_it_is_done() -> None:
    engine = AgentEngine()
    fake, metrics = await played("Counter3", engine, num_samples=1)
    (sample,) = fake.finished[0]
    assert engine.prompts == ["up0\n\nstarta", "up0\n\nstartax<eos>ux1a", "up0\n\nstartax<eos>ux1ax<eos>ux2a"]
    assert (sample.reward, sample.status, sample.response) == (1.5, Status.COMPLETED, "x")
    assert (metrics["turns"], metrics["rows"], metrics["observed_tokens"]) == (3, 1, 2 * len("ux1a"))
    assert sum(sample.loss_mask) == 3 * len("x.")


async def test_methods_may_be_async_and_return_messages_and_what_gymnasium_does() -> None:
    engine = AgentEngine()
    fake, _ = await played("Asynchronous", engine, num_samples=1)
    assert engine.prompts == ["up0ustarta", "up0ustartax<eos>ux1a", "up0ustartax<eos>ux1ax<eos>ux2a"]
    assert fake.finished[0][0].reward == 1.5


class Adds:
    """Has tools."""

    def reset(self, **row: Any) -> None:
        self.sum = 0

    async def add(self, number: int) -> int:
        """Add to the sum.

        Args:
            number: what is added
        """
        self.sum += number
        return self.sum

    def fail(self, how: str) -> str:
        """Fail.

        Args:
            how: an exception's name
        """
        errors = {"value": ValueError("no"), "exit": SystemExit(3), "cancel": asyncio.CancelledError()}
        raise errors.get(how, GiveUp("of a tool"))

    def reward(self) -> dict[str, Any]:
        return {"score": self.sum, "won": self.sum == 7}

    def _helper(self) -> None: ...


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_without_step_the_public_methods_are_tools_and_what_they_raise_is_told_to_the_model() -> None:
    answers = [call("add", number=3) + call("add", number=4), *(call("fail", how=h) for h in ("value", "exit"))]
    left = iter([*answers, call("fail", how="cancel"), call("add", number="x"), call("reset"), "done"])
    engine = AgentEngine(lambda prompt, params: next(left))
    options = {"num_samples": 1, "rollout_max_response_len": 200, "reward_key": "score"}
    fake, metrics = await played("Adds", engine, **options)
    (sample,) = fake.finished[0]
    results = [message["content"] for message in sample.messages if message["role"] == "tool"]
    assert engine.prompts[0] == "Tadd,fail,up0a"
    assert results[:2] == ["3", "7"]
    starts = ["error: ValueError: no", "error: SystemExit: 3", "error: ", "error: TypeError", "error: there is no tool"]
    assert [result.startswith(start) for result, start in zip(results[2:], starts, strict=True)] == [True] * 5
    assert (sample.reward, sample.response, metrics["turns"]) == ({"score": 7.0, "won": 1.0}, "done", 7)


async def test_a_tool_may_give_up() -> None:
    answers = itertools.chain([call("fail", how="give up")], itertools.repeat("done"))
    engine = AgentEngine(lambda prompt, params: next(answers))
    fake, metrics = await played("Adds", engine, rollout_max_response_len=200, reward_key="score")
    assert sorted(sample.remove_sample for sample in fake.finished[0]) == [False, True]
    assert metrics["gave_up_of_a_tool"] == 0.5


class Rewards:
    """What its reward is, comes with the row."""

    steps: ClassVar[Any] = None
    last: ClassVar[Any] = None

    def reset(self) -> None: ...

    def step(self, action: str) -> Any:
        return None, self.steps, True

    def reward(self) -> Any:
        return self.last


@pytest.mark.parametrize(
    ("steps", "last", "key", "expected"),
    [
        (0.5, None, None, 0.5),
        (0.5, 0.25, None, 0.75),
        (None, 0.25, None, 0.25),
        (True, 0, None, 1.0),
        (None, None, None, 1.0),  # that of the run
        (None, {"score": 0.25, "won": 1}, "score", {"score": 0.25, "won": 1.0}),
        (0.5, {"score": 0.25, "won": 1}, "score", {"score": 0.75, "won": 1.0}),
        (0.5, {"won": 1}, "score", {"score": 0.5, "won": 1.0}),
    ],
)
async def test_the_reward_is_the_sum_of_the_steps_and_of_the_last_word(
    steps: Any, last: Any, key: str | None, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rewards, "steps", steps)
    monkeypatch.setattr(Rewards, "last", last)
    fake, _ = await played("Rewards", num_samples=1, **({"reward_key": key} if key else {}))
    assert fake.finished[0][0].reward == expected


class Notes:
    """Notes what it is told."""

    rows: ClassVar[list[dict[str, Any]]] = []

    def reset(self, **row: Any) -> None:
        self.rows.append(row)
        row["changed"] = True

    def step(self, action: str) -> Any:
        return None, 1.0, True


async def test_the_seed_is_that_of_the_run_the_row_and_the_epoch_and_the_same_in_a_group() -> None:
    def seeds() -> list[int]:
        found = [row["seed"] for row in sorted(Notes.rows, key=lambda row: row["prompt"][0]["content"])]
        assert [set(row) for row in Notes.rows] == [{"seed", "prompt", "label", "changed"}] * len(found)
        Notes.rows.clear()
        return found

    await played("Notes", num_groups=2, more_groups=0)
    first = seeds()
    assert first[0] == first[1] != first[2] == first[3]
    await played("Notes", num_groups=2, more_groups=0, rollout_concurrency=1)
    assert seeds() == first
    await played("Notes", num_groups=2, more_groups=0, rollout_seed=7)
    assert not set(seeds()) & set(first)
    assert all(0 <= seed < 1 << 31 for seed in first)


def test_a_row_has_the_metadata_and_a_seed_of_its_own_takes_the_place_of_the_runs() -> None:
    shared = {"size": [4], "seed": 5, "label": "other"}
    row = module._row_of(Sample(prompt="go", label="1", metadata=shared), 0)
    assert row == {"size": [4], "seed": 5, "label": "1", "prompt": "go"}
    row["size"].append(5)
    assert shared["size"] == [4]
    assert module.keywords_for(lambda size, seed=1: None, row) == {"size": [4, 5], "seed": 5}


# -- environments that misbehave -------------------------------------------------------------------


class Misbehaves:
    """A game of two steps. The instances ``bad``, by number, do ``how`` in their method ``at``, once ``siblings`` are
    made.

    closed: numbers of closed instances, as often as they were. released: lets what hangs go on."""

    numbers: ClassVar[Iterator[int]] = itertools.count()
    closed: ClassVar[list[int]] = []
    pids: ClassVar[list[int]] = []
    made: ClassVar[list[int]] = []
    siblings: ClassVar[int] = 1
    bad: ClassVar[tuple[int, ...]] = (0,)
    how: ClassVar[str] = ""
    at: ClassVar[str] = ""
    released: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def prepared(cls, how: str, at: str, bad: tuple[int, ...] = (0,), siblings: int = 1) -> None:
        for numbers in (cls.made, cls.closed, cls.pids):
            numbers.clear()
        Misbehaves.siblings = siblings
        Misbehaves.numbers, Misbehaves.how, Misbehaves.at, Misbehaves.bad = itertools.count(), how, at, bad

    def __init__(self) -> None:
        self.number = next(self.numbers)
        self.made.append(self.number)
        self._do("constructor")

    def reset(self) -> str:
        self.steps = 0
        self._do("reset")
        return "go"

    def step(self, action: str) -> Any:
        self._do("step")
        self.steps += 1
        return "on", 0.5, self.steps == 2

    def reward(self) -> float:
        self._do("reward")
        return 1.0

    def close(self) -> None:
        self.closed.append(self.number)
        self._do("close")

    def _do(self, at: str) -> None:
        if self.number in self.bad and at == self.at:
            assert holds_within(30, lambda: len(self.made) >= self.siblings)
            if self.how == "hang":
                self.released.wait(60)
            elif self.how == "leak" and not self.pids:
                command = "sleep 600 & (setsid sleep 600 &); echo; exec sleep 600"
                started = subprocess.Popen(command, shell=True, start_new_session=True, stdout=subprocess.PIPE)
                assert started.stdout is not None
                started.stdout.readline()
                self.pids.append(started.pid)
            elif self.how not in ("leak", "wait"):
                errors = (ValueError("no"), SystemExit(3), asyncio.CancelledError("no"), GiveUp("broken"))
                raise {type(error).__name__: error for error in errors}[self.how]


class MisbehavesAsync(Misbehaves):
    """The same with methods that are awaited, and hang in an ``await``."""

    async def reset(self) -> str:  # type: ignore[override]
        await self._hang("reset")
        return super().reset()

    async def step(self, action: str) -> Any:
        await self._hang("step")
        return super().step(action)

    async def reward(self) -> float:  # type: ignore[override]
        await self._hang("reward")
        return super().reward()

    async def close(self) -> None:  # type: ignore[override]
        super().close()
        await self._hang("close")

    async def _hang(self, at: str) -> None:
        if self.how == "wait" and self.number in self.bad and at == self.at:
            await asyncio.sleep(FOREVER_S)


METHODS = ("constructor", "reset", "step", "reward")
SLOW = pytest.mark.slow
RAISES = [
    pytest.param(at, how, marks=[SLOW] if how != "ValueError" and at != "step" else [])
    for at in METHODS
    for how in ("ValueError", "SystemExit", "CancelledError")
]


@pytest.mark.parametrize(("at", "how"), RAISES)
async def test_one_that_raises_is_played_once_more_and_its_siblings_stay(
    at: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    Misbehaves.prepared(how, at)
    with caplog.at_level(logging.INFO):
        fake, metrics = await played("Misbehaves", num_samples=3)
    assert [sample.reward for sample in fake.finished[0]] == [2.0] * 3
    assert metrics["failed"] == pytest.approx(1 / 3)
    assert sorted(Misbehaves.closed) == [number for number in range(4) if (number, at) != (0, "constructor")]
    assert f"its {at} raised" in caplog.text
    assert "environment '" in caplog.text
    assert "row source:0:0/" in caplog.text


@pytest.mark.parametrize("name", ["Misbehaves", "MisbehavesAsync"])
async def test_one_that_fails_again_is_masked_and_named_and_its_siblings_are_trained(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    Misbehaves.prepared("ValueError", "step", bad=(0, 3), siblings=3)
    fake, metrics = await played(name, num_samples=3)
    assert sorted((sample.reward or 0, sample.remove_sample) for sample in fake.finished[0]) == [
        (0, True), (2.0, False), (2.0, False),
    ]  # fmt: skip
    assert (metrics["failed"], metrics["masked"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    (message,) = [record.getMessage() for record in caplog.records if "masked" in record.getMessage()]
    assert f"environment '{__name__}:{name}', row source:0:0/" in message
    assert "its step raised ValueError: no" in message
    assert 'test_environment.py", line' in message
    assert sorted(Misbehaves.closed) == [0, 1, 2, 3]
    _, columns = GroupConverter(make_args()).encode(fake.finished[0], False)
    assert sorted(mask.sum() for mask in columns["loss_mask"]) == [0, 4, 4]


async def test_a_group_whose_samples_all_fail_has_failed() -> None:
    Misbehaves.prepared("ValueError", "reset", bad=tuple(range(99)))
    with pytest.raises(RolloutError, match="its reset raised ValueError: no"):
        await played("Misbehaves", more_groups=2)


async def test_in_an_evaluation_no_sample_is_masked_but_its_group_is_tried_again() -> None:
    Misbehaves.prepared("ValueError", "step", bad=(0, 2), siblings=2)
    fake, _ = await played("Misbehaves", evaluation=True)
    assert [(sample.reward, sample.remove_sample) for sample in fake.finished[0]] == [(2.0, False)] * 2
    assert [kind for kind, _ in fake.failures] == ["data"]


@pytest.mark.parametrize("at", [*METHODS])
async def test_one_that_gives_up_is_masked(at: str) -> None:
    Misbehaves.prepared("GiveUp", at)
    fake, metrics = await played("Misbehaves")
    assert sorted(sample.remove_sample for sample in fake.finished[0]) == [False, True]
    assert metrics["gave_up_broken"] == 0.5


HANGS = [
    ("Misbehaves", "hang", "step"),
    *(
        pytest.param(name, how, at, marks=SLOW)
        for name, how in (("Misbehaves", "hang"), ("MisbehavesAsync", "hang"), ("MisbehavesAsync", "wait"))
        for at in METHODS[name == "MisbehavesAsync" :]
    ),
]


@pytest.mark.parametrize(("name", "how", "at"), HANGS)
async def test_one_that_hangs_ends_at_the_deadline_and_nothing_else_waits(
    name: str, how: str, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    Misbehaves.prepared(how, at)
    began = time.monotonic()
    fake, metrics = await played(name, num_samples=3, agent_timeout_s=1.0)
    assert time.monotonic() - began < 10
    assert sorted(sample.reward or 0 for sample in fake.finished[0]) == [0, 2.0, 2.0]
    assert metrics["end_timeout"] == pytest.approx(1 / 3)
    (bad,) = [sample for sample in fake.finished[0] if not sample.reward]
    is_asked = at in ("step", "reward")
    assert (bad.remove_sample, bad.response_length > 0) == (not is_asked, is_asked)
    assert f"was in its {at} at the end of the play" in caplog.text
    assert ("its thread is left to itself" in caplog.text) == (how == "hang")
    if how == "hang":
        assert "test_environment.py:" in caplog.text
    assert sorted(Misbehaves.closed) == ([1, 2] if at == "constructor" else [0, 1, 2])
    Misbehaves.released.set()  # what answers late changes nothing, and an instance that was made late is closed
    assert holds_within(10, lambda: sorted(Misbehaves.closed) == [0, 1, 2])
    assert [sample.reward for sample in fake.finished[0]].count(2.0) == 2


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("Misbehaves", "ValueError", "its close raised ValueError: no"),
        ("Misbehaves", "SystemExit", "its close raised SystemExit: 3"),
        ("Misbehaves", "hang", "its close was not done within 0.3 s"),
        ("MisbehavesAsync", "wait", "its close was not done within 0.3 s"),
    ],
)
async def test_one_whose_close_fails_is_named_and_its_sample_stays(
    name: str, how: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    Misbehaves.prepared(how, "close")
    fake, metrics = await played(name)
    assert [sample.reward for sample in fake.finished[0]] == [2.0, 2.0]
    assert (sorted(Misbehaves.closed), metrics["close_failed"]) == ([0, 1], 0.5)
    assert said in caplog.text


@pytest.mark.parametrize("at", [*METHODS, "close"])
async def test_processes_that_one_leaves_behind_are_ended_and_named(at: str, caplog: pytest.LogCaptureFixture) -> None:
    others = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 (of another play, or of the worker)
    try:
        Misbehaves.prepared("leak", at)
        fake, metrics = await played("Misbehaves")
        (pid,) = Misbehaves.pids
        assert not is_running(pid)
        assert is_running(others.pid)
    finally:
        others.kill()
        others.wait()
    assert [sample.reward for sample in fake.finished[0]] == [2.0, 2.0]
    assert metrics["left_processes"] == 1.5  # three of one of two samples: a child, its child, and a daemon
    assert f"{pid} (" in caplog.text
    assert "sleep 600" in caplog.text


async def test_processes_that_a_hung_method_starts_later_end_with_the_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Misbehaves.prepared("hang", "step")
    started = threading.Event()

    def hang_then_start(self: Any, at: str) -> None:
        if self.number == 0 and at == "step":
            self.released.wait(60)
            self.pids.append(subprocess.Popen(["sleep", "600"]).pid)
            started.set()

    monkeypatch.setattr(Misbehaves, "_do", hang_then_start)
    end_processes = module.Environments.aclose

    async def release_first(self: Any) -> None:
        Misbehaves.released.set()
        assert await asyncio.to_thread(started.wait, 30)
        await end_processes(self)

    monkeypatch.setattr(module.Environments, "aclose", release_first)
    await played("Misbehaves", agent_timeout_s=0.5)
    assert not is_running(Misbehaves.pids[0])


@pytest.mark.parametrize(
    ("options", "end"),
    [({"agent_max_turns": 1}, "max_turns"), ({"rollout_max_context_len": 10}, "context_length")],
)
async def test_at_a_limit_of_the_session_it_is_closed_and_cut(options: dict[str, Any], end: str) -> None:
    Misbehaves.prepared("", "")
    fake, metrics = await played("Misbehaves", num_samples=1, **options)
    (sample,) = fake.finished[0]
    assert (sample.status, sample.reward, Misbehaves.closed) == (Status.TRUNCATED, 0.0, [0])
    assert metrics[f"end_{end}"] == 1


async def test_one_that_an_over_sampled_rollout_does_not_need_is_closed_at_once() -> None:
    Misbehaves.prepared("", "")
    engine = AgentEngine(lambda prompt, params: asyncio.Event().wait() if "p1" in prompt else "x")
    async with asyncio.timeout(20):
        fake, metrics = await played("Misbehaves", engine, num_samples=1, over_sampling_batch_size=2)
    assert [sample.reward for sample in fake.finished[0]] == [2.0]
    assert (sorted(Misbehaves.closed), metrics["end_stopped"]) == ([0, 1], 1)


WRONG = [
    ("reset", lambda self: 3, "its reset returned 3"),
    ("reset", lambda self: ["a"], "its reset returned ['a']"),
    ("step", lambda self, action: "on", "its step returned 'on'"),
    ("step", lambda self, action: (None, 0.5, False), "an observation, unless it is done"),
    ("step", lambda self, action: ("on", "much", True), "its step gave a wrong reward"),
    ("step", lambda self, action: ("on", float("nan"), True), "its step gave a wrong reward"),
    ("step", lambda self, action: ("on", {"score": 1}, True), "a number as the reward"),
    ("reward", lambda self: "much", "its reward gave a wrong reward"),
    ("reward", lambda self: {"score": 1}, "set --reward-key"),
]


@pytest.mark.parametrize(
    ("method", "answer", "said"), [pytest.param(*case, marks=[SLOW] if case[0] != "step" else []) for case in WRONG]
)
async def test_what_is_no_answer_is_a_failure_that_says_what_was_expected(
    method: str, answer: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Misbehaves.prepared("", "")
    monkeypatch.setattr(Misbehaves, method, answer)
    with pytest.raises(RolloutError, match="environment") as caught:
        await played("Misbehaves", num_samples=1)
    assert said in str(caught.value)


def makes_nothing() -> str:
    """A factory that is wrong."""
    return "nonsense"


async def test_what_a_factory_makes_must_have_reset() -> None:
    with pytest.raises(
        RolloutError, match=r"its constructor returned 'nonsense'[^:]*\n  expected: an object with reset"
    ):
        await played("makes_nothing", num_samples=1)


# -- what is refused before a run ------------------------------------------------------------------


class Untyped:
    def reset(self) -> None: ...

    def look(self, at):  # type: ignore[no-untyped-def]
        """Look."""


class NoWay:
    def reset(self) -> None: ...


class NoReset:
    def step(self, action: str) -> Any: ...


class Needs(Counter3):
    def __init__(self, config: Any, more: Any) -> None: ...


def test_tools_are_the_public_methods_in_their_order_with_those_of_bases() -> None:
    class More(Adds):
        def zero(self) -> str:
            """Begin again."""
            return "0"

    names = [schema["function"]["name"] for schema in tools_of(More)]
    assert names == ["add", "fail", "zero"]
    assert list(tools_of(Adds)[0]["function"]["parameters"]["properties"]) == ["number"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("Untyped", "method 'look' of Untyped: 'look' has no schema"), ("NoWay", "NoWay has no method for the model")],
)
def test_one_without_step_and_without_tools_that_have_a_schema_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_environment(SimpleNamespace(environment=f"{HERE}:{name}"), PluginRegistry())  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [{"agent_path": "a:b"}, {"agent_command": "true"}, {"tools_path": ["a:b"]}])
def test_an_environment_and_another_agent_are_refused_by_both_names(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="an environment is played by the built-in agent") as caught:
        AgentOptions.check(make_args(**{"agent_path": None, "environment": "c:D", **other}))
    (name,) = other
    assert caught.value.where == f"--{name.replace('_', '-')} and --environment"


COMMANDS = [
    ("NoReset", "the class lacks reset"),
    ("Needs", "cannot be constructed with"),
    ("NoWay", "NoWay has no method for the model"),
    ("Untyped", "has no schema"),
    ("Missing", "has no 'Missing'"),
]


@pytest.mark.parametrize(("name", "said"), COMMANDS)
def test_each_refusal_comes_from_the_command_before_anything_starts(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_task: dict[str, str]
) -> None:
    fixed = [word for option, value in tiny_task.items() for word in (f"--{option}", value)]
    words = ["train", "--dry-run", "--num-rollout", "1", *fixed, "--run-dir", str(tmp_path / "run")]
    assert main([*words, "--environment", f"{HERE}:{name}"]) != 0
    out = capsys.readouterr()
    assert said in out.out + out.err
