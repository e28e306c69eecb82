"""Agents in a rollout: what becomes of samples whose agents fail, hang, give up or come late, and of their siblings."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import openai
import pytest

from buffer_rl.agents import play
from buffer_rl.errors import EngineError, RolloutError
from buffer_rl.kinds.agent import GiveUp
from buffer_rl.records.groups import Sample, Status
from buffer_rl.rollout.conversion import GroupConverter
from harness.agent_play import AgentEngine, make_args, roll, user

FOREVER_S = 600.0


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "GRACE_S", 0.1)
    monkeypatch.setattr(play, "STOPPED_S", 0.05)


def of(metrics: dict[str, float]) -> dict[str, float]:
    """Those of agents, without their first part."""
    return {name.removeprefix("agent/"): value for name, value in metrics.items() if name.startswith("agent/")}


class Plays:
    """An async agent that asks once and returns its sample's index. For the first sample it does ``other`` then.
    counts: plays by sample index."""

    def __init__(self, other: Callable[..., Any]) -> None:
        self.counts: Counter[int] = Counter()
        self._other = other

    async def __call__(self, args: Any, sample: Sample, session: Any) -> Any:
        self.counts[sample.sample_index] += 1
        await session.chat(user("go"))
        if sample.sample_index == 0:
            return await self._other(sample, session, self.counts[0])
        return float(sample.sample_index)


async def test_rewards_of_agents_and_of_the_run_are_those_of_the_sample() -> None:
    async def agent(args: Any, sample: Sample, session: Any) -> Any:
        await session.chat(user("go"))
        return {"score": 0.25} if sample.sample_index else None

    reward = f"{__file__}:score_by_messages"
    fake, metrics = await roll(agent, AgentEngine(), custom_rm_path=reward, reward_key="score")
    assert [sample.reward for sample in fake.finished[0]] == [{"score": 0.75}, {"score": 0.25}]
    assert of(metrics) == {"late": 0, "observed_tokens": 0, "prompt_new": 1, "rows": 1, "turns": 1}


async def score_by_messages(args: Any, sample: Sample) -> dict[str, float]:
    """0.75 for the one conversation of the test above."""
    exact = sample.messages == [*user("go"), {"role": "assistant", "content": "x"}]
    return {"score": 0.75 if exact and (sample.response, sample.response_length) == ("x", 2) else 0.0}


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("where", ["async", "plain"])
async def test_an_agent_that_raises_is_played_once_more_and_its_siblings_stay(
    error: type[BaseException], where: str
) -> None:
    counts: Counter[int] = Counter()

    def fails_once(sample: Sample) -> float:
        counts[sample.sample_index] += 1
        if counts[0] == 1 and sample.sample_index == 0:
            raise error("no")
        return 1.0

    async def awaits(args: Any, sample: Sample, session: Any) -> float:
        await session.chat(user("go"))
        return fails_once(sample)

    def plain(args: Any, sample: Sample, session: Any) -> float:
        session.chat(user("go"))
        return fails_once(sample)

    engine = AgentEngine()
    fake, metrics = await roll(awaits if where == "async" else plain, engine)
    assert counts == {0: 2, 1: 1}
    assert [sample.status for sample in fake.finished[0]] == [Status.COMPLETED] * 2
    assert (of(metrics)["failed"], of(metrics)["turns"]) == (0.5, 1)
    assert fake.failures == {}
    assert len({params["sampling_seed"] for _, _, params in engine.calls}) == 3


async def test_an_agent_that_fails_twice_is_a_failure_of_the_group_that_names_it() -> None:
    async def raises(sample: Sample, session: Any, number: int) -> None:
        raise ValueError("never")

    agent = Plays(raises)
    with pytest.raises(RolloutError, match=r"agent .*agent_of_options.*row source:0:0/0.*ValueError: never") as caught:
        await roll(agent, AgentEngine(), more_groups=2)
    assert str(caught.value).count("  File ") == 2  # those of the agent
    assert agent.counts == {0: 8, 1: 4}  # two attempts at each of two groups


@pytest.mark.parametrize(
    ("answer", "what"),
    [("yes", "it returned 'yes'"), (float("nan"), "nan"), ({}, "it returned"), ({"a": "b"}, "it returned")],
)
async def test_what_is_no_reward_is_a_failure(answer: Any, what: str) -> None:
    async def returns(sample: Sample, session: Any, number: int) -> Any:
        return answer if number == 1 else 0.5

    agent = Plays(returns)
    _, metrics = await roll(agent, AgentEngine())
    assert (agent.counts[0], of(metrics)["failed"]) == (2, 0.5)


async def test_an_agent_that_asks_for_nothing_or_names_no_answer_is_a_failure() -> None:
    counts: Counter[int] = Counter()

    async def agent(args: Any, sample: Sample, session: Any) -> float:
        counts[sample.sample_index] += 1
        if counts[sample.sample_index] == 1:
            if sample.sample_index:
                await session.chat(user("go"))
                session.score("chatcmpl-none")
            return 1.0
        await session.chat(user("go"))
        return 1.0

    fake, metrics = await roll(agent, AgentEngine())
    assert (counts, of(metrics)["failed"], len(fake.finished)) == ({0: 2, 1: 2}, 1, 1)


async def test_an_agent_that_hangs_is_cut_with_what_there_is_and_has_the_lowest_reward() -> None:
    async def hangs(sample: Sample, session: Any, number: int) -> None:
        await session.chat([*user("go"), {"role": "assistant", "content": "x"}, *user("on")])
        await asyncio.sleep(FOREVER_S)

    agent = Plays(hangs)
    fake, metrics = await roll(agent, AgentEngine(), num_samples=3, agent_timeout_s=1.5)
    cut, *others = fake.finished[0].samples
    assert agent.counts == {0: 1, 1: 1, 2: 1}
    assert (cut.status, cut.reward, cut.response_length, cut.remove_sample) == (Status.TRUNCATED, 0.0, 8, False)
    assert [(other.status, other.reward) for other in others] == [(Status.COMPLETED, 1.0), (Status.COMPLETED, 2.0)]
    assert of(metrics)["end_timeout"] == pytest.approx(1 / 3)


async def test_the_lowest_reward_is_that_of_the_group_if_it_is_below_zero() -> None:
    async def hangs(sample: Sample, session: Any, number: int) -> None:
        await asyncio.sleep(FOREVER_S)

    async def lower(args: Any, sample: Sample, session: Any) -> Any:
        reward = await Plays(hangs)(args, sample, session)
        return {"score": -reward}

    fake, _ = await roll(lower, AgentEngine(), num_samples=3, agent_timeout_s=1.5, reward_key="score")
    assert [sample.reward for sample in fake.finished[0]] == [{"score": -2.0}, {"score": -1.0}, {"score": -2.0}]


async def test_a_plain_agent_that_hangs_in_a_request_is_cut_and_let_go() -> None:
    ended = threading.Event()

    def agent(args: Any, sample: Sample, session: Any) -> float:
        try:
            session.chat(user("go"))
            session.chat(user("hang"))
        finally:
            ended.set()
        return 1.0

    engine = AgentEngine(lambda prompt, params: asyncio.Event().wait() if "hang" in prompt else "x")
    fake, metrics = await roll(agent, engine, num_samples=1, agent_timeout_s=1.5)
    assert fake.finished[0][0].status is Status.TRUNCATED
    assert of(metrics)["end_timeout"] == 1
    assert await asyncio.to_thread(ended.wait, 30)
    assert len(engine.cancelled) == 1


async def test_a_sample_that_was_cut_before_its_first_answer_is_masked_and_its_siblings_are_trained() -> None:
    async def agent(args: Any, sample: Sample, session: Any) -> None:
        if sample.sample_index == 0:
            await asyncio.sleep(FOREVER_S)
        await session.chat(user("go"))

    fake, metrics = await roll(agent, AgentEngine(), agent_timeout_s=1.5)
    masked, trained = fake.finished[0].samples
    assert (masked.remove_sample, masked.reward, masked.response_length) == (True, None, 0)
    assert (trained.remove_sample, trained.reward) == (False, 1.0)
    assert (of(metrics)["end_timeout"], of(metrics)["rows"]) == (0.5, 0.5)
    _, columns = GroupConverter(make_args()).encode(fake.finished[0], False)
    assert [mask.tolist() for mask in columns["loss_mask"]] == [[0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"agent_max_turns": 2}, "max_turns"),
        ({"agent_max_tokens": 4}, "max_tokens"),
        ({"rollout_max_context_len": 12}, "context_length"),
    ],
)
async def test_an_agent_that_goes_beyond_a_limit_is_cut_there(options: dict[str, Any], end: str) -> None:
    async def agent(args: Any, sample: Sample, session: Any) -> float:
        messages = user("go")
        while True:
            messages = [*messages, await session.chat(messages), *user("n")]

    fake, metrics = await roll(agent, AgentEngine(), num_samples=1, **options)
    (cut,) = fake.finished[0].samples
    assert (cut.status, cut.reward, sum(cut.loss_mask or [])) == (Status.TRUNCATED, 0.0, 4)
    assert (of(metrics)[f"end_{end}"], of(metrics)["turns"], of(metrics)["observed_tokens"]) == (1, 2, 3)


async def test_a_conversation_that_is_too_long_gives_up_if_the_options_say_so() -> None:
    async def overflows(sample: Sample, session: Any, number: int) -> None:
        await session.chat(user("x" * 20))

    options = {"rollout_max_context_len": 9, "agent_overflow": "give-up"}
    fake, metrics = await roll(Plays(overflows), AgentEngine(), **options)
    masked, trained = fake.finished[0].samples
    assert (masked.remove_sample, masked.reward, trained.reward) == (True, None, 1.0)
    assert of(metrics)["gave_up_context_length"] == 0.5


@pytest.mark.parametrize(
    ("reason", "name"),
    [("browser", "browser"), ("the browser: 502!", "the_browser_502_"), ("", "unnamed"), ("x" * 99, "x" * 40)],
)
async def test_a_sample_that_its_agent_gives_up_is_masked_and_never_scored(reason: str, name: str) -> None:
    async def gives_up(sample: Sample, session: Any, number: int) -> None:
        raise GiveUp(reason)

    agent = Plays(gives_up)
    fake, metrics = await roll(agent, AgentEngine(), num_samples=3)
    masked, *trained = fake.finished[0].samples
    assert agent.counts == {0: 1, 1: 1, 2: 1}
    assert (masked.remove_sample, masked.reward, [each.reward for each in trained]) == (True, None, [1.0, 2.0])
    assert of(metrics)[f"gave_up_{name}"] == pytest.approx(1 / 3)
    _, columns = GroupConverter(make_args()).encode(fake.finished[0], False)
    assert [mask.sum() for mask in columns["loss_mask"]] == [0, 2, 2]
    assert columns["reward"].tolist()[0] == 0
    assert columns["reward"].tolist()[1] == pytest.approx(-columns["reward"].tolist()[2])


async def test_the_failure_of_an_engine_is_one_of_the_infrastructure_whatever_the_agent_makes_of_it() -> None:
    failures = iter([EngineError("it is gone")])

    def fails_once(prompt: str, params: dict[str, Any]) -> str:
        for error in failures:
            raise error
        return "x"

    async def agent(args: Any, sample: Sample, session: Any) -> float:
        try:
            await session.chat(user("go"))
        except EngineError:
            return 0.0
        return 1.0

    fake, metrics = await roll(agent, AgentEngine(fails_once), num_samples=1)
    assert [kind for kind, _ in fake.failures] == ["infra"]
    assert ([sample.reward for sample in fake.finished[0]], metrics["infra_failures"]) == ([1.0], 1.0)
    assert "failed" not in of(metrics)


async def test_what_asks_after_the_end_is_refused_and_counted() -> None:
    address: dict[str, str] = {}
    codes: list[int] = []

    async def agent(args: Any, sample: Sample, session: Any) -> float:
        await session.chat(user("go"))
        if sample.sample_index == 0:
            address.update(base_url=session.base_url, api_key=session.api_key)
            return 0.0
        while not address:  # noqa: ASYNC110 (of another sample)
            await asyncio.sleep(0.001)
        async with openai.AsyncOpenAI(**address, max_retries=5) as late:  # type: ignore[arg-type]
            while not codes:
                try:
                    await late.models.list()  # answered as long as the other session is open
                except openai.APIStatusError as error:
                    codes.append(error.status_code)
            try:
                await late.chat.completions.create(model="any", messages=user("late"))  # type: ignore[arg-type]
            except openai.APIStatusError as error:
                codes.append(error.status_code)
        return 1.0

    engine = AgentEngine()
    _, metrics = await roll(agent, engine)
    assert (codes, of(metrics)["late"], len(engine.calls)) == ([410, 410], 1, 2)


@pytest.mark.parametrize("kind", ["sleeps", "asks", "swallows", "plain"])
async def test_agents_that_an_over_sampled_rollout_does_not_need_end_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play, "GRACE_S", FOREVER_S)
    free = threading.Event()

    async def agent(args: Any, sample: Sample, session: Any) -> float:
        if sample.uid is None or sample.uid.row == 0:
            await session.chat(user("go"))
            return 1.0
        while True:
            try:
                await (session.chat(user("hang")) if kind == "asks" else asyncio.sleep(FOREVER_S))
            except BaseException:
                if kind != "swallows" or free.is_set():
                    raise

    def plain(args: Any, sample: Sample, session: Any) -> float:
        if sample.uid is None or sample.uid.row == 0:
            session.chat(user("go"))
            return 1.0
        free.wait(60)
        return 0.0

    engine = AgentEngine(lambda prompt, params: asyncio.Event().wait() if "hang" in prompt else "x")
    async with asyncio.timeout(20):
        fake, metrics = await roll(
            plain if kind == "plain" else agent, engine, num_groups=1, more_groups=1, over_sampling_batch_size=2
        )
    free.set()
    assert [group.uid.row for group in fake.finished] == [0]
    assert [group.uid.row for group in fake.returned] == [1]
    assert (metrics["aborted_groups"], of(metrics)["end_stopped"]) == (1.0, 1.0)  # two, over two that were played
    assert "failed" not in of(metrics)


async def test_an_agent_that_blocks_the_loop_is_cut_and_the_others_are_played_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts: Counter[int] = Counter()
    free = threading.Event()

    async def agent(args: Any, sample: Sample, session: Any) -> float:
        counts[sample.sample_index] += 1
        await session.chat(user("go"))
        if sample.sample_index == 0:
            free.wait(60)
        elif counts[sample.sample_index] == 1:
            await asyncio.sleep(FOREVER_S)
        return 1.0

    with caplog.at_level(logging.INFO, "buffer_rl.agents"):
        fake, metrics = await roll(agent, AgentEngine(), num_samples=3, agent_timeout_s=2.0)
    free.set()
    assert counts == {0: 1, 1: 2, 2: 2}
    assert [sample.status for sample in fake.finished[0]] == [Status.TRUNCATED, Status.COMPLETED, Status.COMPLETED]
    assert (of(metrics)["failed"], of(metrics)["end_timeout"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert f"the agent of row source:0:0/0.0 at {__file__}:" in caplog.text


async def test_an_agent_that_leaves_requests_running_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(args: Any, sample: Sample, session: Any) -> float:
        await session.chat(user("go"))
        session.chat(user("hang"))
        return 1.0

    engine = AgentEngine(lambda prompt, params: asyncio.Event().wait() if "hang" in prompt else "x")
    with caplog.at_level(logging.WARNING, "buffer_rl.agents"):
        fake, _ = await roll(agent, engine)
    assert len([r for r in caplog.records if "ended while 1 of its requests were running" in r.getMessage()]) == 1
    assert [sample.response_length for sample in fake.finished[0]] == [2, 2]
    assert len(engine.cancelled) == 2


@pytest.mark.parametrize("fault", ["give_up", "late"])
async def test_an_evaluation_plays_the_same_agent_and_gives_every_sample_a_reward(fault: str) -> None:
    async def other(sample: Sample, session: Any, number: int) -> float:
        if fault == "give_up":
            raise GiveUp("browser")
        await asyncio.sleep(FOREVER_S)
        return 1.0

    fake, metrics = await roll(Plays(other), AgentEngine(), num_samples=3, evaluation=True, agent_timeout_s=1.5)
    assert [sample.reward for sample in fake.finished[0]] == [0.0, 1.0, 2.0]
    assert metrics["eval/default"] == 1.0
    assert of(metrics) == {}


async def test_a_turn_that_is_not_trained_is_context_of_those_that_are() -> None:
    """``u1a`` p<eos> ``u2a`` q<eos> ``u3a`` r<eos>, of which q is not trained; and one that nothing follows, z."""

    async def act(args: Any, sample: Any, session: Any) -> float:
        messages: list[Any] = []
        for number, train in enumerate((True, False, True), start=1):
            messages += user(str(number))
            messages.append(await session.chat(messages, train=train))
        await session.generate([5, 6], train=False)
        return 1.0

    texts = iter("pqrz")
    fake, metrics = await roll(act, AgentEngine(lambda prompt, params: next(texts)), num_samples=1)
    (played,) = fake.finished[0]
    assert (played.response, len(played.rows), metrics["agent/untrained"], metrics["agent/turns"]) == ("r", 1, 2, 4)
    assert played.loss_mask == [1, 1, *[0] * len("u2aq.u3a"), 1, 1]
    assert [each for each in played.rollout_log_probs if each] == [-0.5] * 4


async def test_an_agent_none_of_whose_answers_is_trained_is_a_failure() -> None:
    async def act(args: Any, sample: Any, session: Any) -> float:
        await session.chat(user("1"), train=False)
        return 1.0

    with pytest.raises(RolloutError, match="had asked for no answer that is trained"):
        await roll(act, AgentEngine(), num_samples=1)
