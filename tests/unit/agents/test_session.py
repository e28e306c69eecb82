"""A session over an engine in this process: seeds, limits, ends, and the answer that the reward is about."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from buffer_rl.agents.session import (
    AgentFailedError,
    End,
    Session,
    SessionEndedError,
    SessionHandle,
    TooLongError,
)
from buffer_rl.agents.turns import rows
from buffer_rl.errors import DataError, EngineError
from buffer_rl.records.groups import Sample, VersionSpan
from buffer_rl.rollout.requests import Requests
from harness.agent_play import AgentEngine, roll, session_of, user


def echo(prompt: str, params: dict[str, Any]) -> str:
    """The last character of the prompt that is not the mark of an answer."""
    return prompt[-2:-1]


def say(*answers: str) -> Any:
    """One after the other."""
    left = iter(answers)
    return lambda prompt, params: next(left)


async def test_a_turn_has_what_the_engine_answered_and_the_message_is_its_text() -> None:
    engine = AgentEngine(echo)
    async with session_of(engine) as session:
        exchange = await session.chat(user("1+1"))
        turn = exchange.turn
    assert engine.prompts == ["u1+1a"]
    assert turn.prompt_ids == tuple(engine.calls[0][1])
    assert turn.output_ids == (*engine.tokenizer.encode("1"), 1)
    assert turn.log_probs == (-0.5, -0.5)
    assert turn.spans == (VersionSpan(3, 0, 2),)
    assert exchange.answer is not None
    assert exchange.answer.message == {"role": "assistant", "content": "1"}
    assert exchange.answer.finish_reason == "stop"


async def test_a_turn_asks_for_the_experts_of_the_tokens_that_no_earlier_turn_has() -> None:
    """Each token has those of the first request that held it, also where two turns go on from one."""
    engine = AgentEngine(echo, experts=True)
    async with session_of(engine, replay_routed_experts=True) as session:
        first = await session.chat(user("7"))
        assert first.answer is not None
        said = [*user("7"), first.answer.message]
        second, third = await session.chat([*said, *user("8")]), await session.chat([*said, *user("9")])
        other = await session.chat(user("5"))
        found = {
            row.turns[-1].digest: row.rollout_routed_experts for row in rows(each.turn for each in session.exchanges)
        }
    known = first.turn.num_tokens - 1
    assert engine.starts == [0, known, known, 0]
    for number, exchange in ((2, second), (3, third)):
        experts = found[exchange.turn.digest]
        assert experts is not None
        length = exchange.turn.num_tokens - 1
        assert experts[:, 0].tolist() == [[at, 1 if at < known else number] for at in range(length)]
        assert exchange.turn.experts is not None
        assert len(exchange.turn.experts) == length - known
    experts = found[other.turn.digest]
    assert experts is not None
    assert len(experts) == other.turn.num_tokens - 1


async def test_the_next_turn_goes_on_behind_the_ids_of_the_one_before_it() -> None:
    engine = AgentEngine(echo)
    async with session_of(engine) as session:
        first = await session.chat(user("7"))
        assert first.answer is not None
        second = await session.chat([*user("7"), first.answer.message, *user("8")])
        (row,) = rows(each.turn for each in session.exchanges)
    assert second.turn.prompt_ids[: len(first.turn.prompt_ids) + 2] == (*first.turn.prompt_ids, *first.turn.output_ids)
    assert (row.loss_mask, session.causes) == ([1, 1, 0, 0, 0, 1, 1], {"new": 1, "extends": 1})


async def test_equal_requests_have_different_seeds_and_different_ids() -> None:
    engine = AgentEngine()
    async with session_of(engine) as session:
        found = [await session.chat(user("a")) for _ in range(4)]
    assert len({params["sampling_seed"] for _, _, params in engine.calls}) == 4
    assert len({rid for rid, _, _ in engine.calls}) == 4
    assert [each.turn.ordinal for each in found] == [0, 1, 2, 3]
    assert len({each.id for each in found}) == 4


@pytest.mark.parametrize("options", [{}, {"agent_max_tokens": 7}])
async def test_a_seed_does_not_depend_on_the_order_of_calls_whose_ids_differ(options: dict[str, Any]) -> None:
    seen = []
    for order in itertools.permutations("abc"):
        engine = AgentEngine()
        async with session_of(engine, **options) as session:
            for text in order:
                await session.chat(user(text))
            await session.chat(user("a"))
            digests = {each.turn.prompt_ids: each.turn.digest for each in session.exchanges}
        seen.append((engine.seeds, digests))
    assert all(each == seen[0] for each in seen)


async def test_a_seed_depends_on_run_row_sample_play_and_parameters() -> None:
    async def seed(max_tokens: int | None = None, **where: Any) -> int:
        engine = AgentEngine()
        async with session_of(engine, **where) as session:
            await session.chat(user("a"), max_tokens=max_tokens)
        return int(engine.calls[0][2]["sampling_seed"])

    seeds = [
        await seed(),
        await seed(row=1),
        await seed(index=1),
        await seed(play=1),
        await seed(rollout_seed=5),
        await seed(rollout_temperature=0.5),
        await seed(max_tokens=3),
    ]
    assert len(set(seeds)) == len(seeds)
    assert await seed() == seeds[0]
    assert all(0 <= each < 2**31 for each in seeds)


async def test_max_tokens_and_stop_may_only_shorten() -> None:
    engine = AgentEngine(lambda prompt, params: "xxxxxxxxxx")
    async with session_of(engine, rollout_max_response_len=5, rollout_stop=["!"]) as session:
        short = await session.chat(user("a"), max_tokens=3, stop=["?"])
        await session.chat(user("b"), max_tokens=100)
    assert [params["max_new_tokens"] for _, _, params in engine.calls] == [3, 5]
    assert [params["stop"] for _, _, params in engine.calls] == [["!", "?"], ["!"]]
    assert short.answer is not None
    assert (len(short.turn.output_ids), short.answer.finish_reason) == (3, "length")


@pytest.mark.parametrize("stop", ["END", ["END"]])
async def test_a_stop_string_is_one_string_in_a_run_that_has_none_of_its_own(stop: Any) -> None:
    async def agent(args: Any, sample: Sample, session: Any) -> float:
        await session.chat(user("go"), stop=stop)
        return 1.0

    engine = AgentEngine()
    fake, _ = await roll(agent, engine, num_samples=1, more_groups=0)
    assert [params["stop"] for _, _, params in engine.calls] == [["END"]]
    assert [sample.reward for group in fake.finished for sample in group] == [1.0]


async def test_an_answer_is_read_whatever_the_names_of_tools_are() -> None:
    tools = [{"type": "function", "function": {"name": ["add"], "parameters": {}}}]
    async with session_of(AgentEngine(say("so<tool_call>{}</tool_call>"))) as session:
        assert (await session.chat(user("go"), tools)).reply.message["content"] == "so<tool_call>{}</tool_call>"


async def test_after_the_last_turn_the_session_has_ended() -> None:
    engine = AgentEngine()
    async with session_of(engine, agent_max_turns=2) as session:
        await session.chat(user("a"))
        await session.generate([5, 6])
        with pytest.raises(SessionEndedError, match="max_turns"):
            await session.chat(user("c"))
        assert (session.end, session.ended.result()) == (End.TURNS, End.TURNS)
        session.close(End.DONE)
        assert session.end is End.TURNS
    assert len(engine.calls) == len(session.exchanges) == 2


async def test_the_last_answer_is_cut_at_the_tokens_that_are_left_and_then_the_session_has_ended() -> None:
    engine = AgentEngine(lambda prompt, params: "xxx")
    async with session_of(engine, agent_max_tokens=6) as session:
        first, second = await session.chat(user("a")), await session.chat(user("b"))
        assert (len(first.turn.output_ids), len(second.turn.output_ids)) == (4, 2)
        with pytest.raises(SessionEndedError, match="max_tokens"):
            await session.chat(user("c"))
        assert session.end is End.TOKENS


async def test_a_prompt_that_fills_the_context_is_refused_and_a_shorter_one_is_answered() -> None:
    engine = AgentEngine(lambda prompt, params: "xxxxxxxxxx")
    async with session_of(engine, rollout_max_context_len=8) as session:
        with pytest.raises(TooLongError, match="maximum context length is 8 tokens, and the messages have 8"):
            await session.chat(user("123456"))
        assert (session.overflowed, session.end) == (True, None)
        exchange = await session.chat(user("12345"))
        assert (session.overflowed, len(exchange.turn.output_ids)) == (False, 1)
    assert len(engine.calls) == 1


async def test_the_context_of_the_engine_is_a_limit_too() -> None:
    async with session_of(AgentEngine(), rollout_max_context_len=100, engine_context_length=8) as session:
        with pytest.raises(TooLongError, match="is 8 tokens"):
            await session.generate(range(3, 11))


async def test_messages_that_are_none_leave_the_session_as_it_is() -> None:
    engine = AgentEngine()
    async with session_of(engine) as session:
        with pytest.raises(DataError) as caught:
            await session.chat([])
        assert (caught.value.status, session.end, session.exchanges) == (400, None, [])
    assert engine.calls == []


async def test_a_failure_of_an_engine_ends_the_session_and_is_kept() -> None:
    def fails(prompt: str, params: dict[str, Any]) -> str:
        raise EngineError("it is gone")

    async with session_of(AgentEngine(fails)) as session:
        with pytest.raises(EngineError, match="it is gone") as caught:
            await session.chat(user("a"))
        assert (session.end, session.failure) == (End.ENGINE, caught.value)
        with pytest.raises(SessionEndedError):
            await session.chat(user("b"))


async def test_an_answer_that_the_rollout_aborted_is_not_recorded_and_ends_the_session() -> None:
    requests, engine = Requests(), AgentEngine(lambda prompt, params: asyncio.Event().wait())
    async with session_of(engine, requests=requests) as session:
        task = asyncio.ensure_future(session.chat(user("a")))
        await engine.asked.wait()
        await requests.stop(engine, lambda: [] if task.done() else [task])  # type: ignore[arg-type]
        with pytest.raises(SessionEndedError, match="stopped"):
            await task
        assert (session.end, session.exchanges, session.running) == (End.STOPPED, [], 0)
        with pytest.raises(SessionEndedError, match="stopped"):
            await session.generate([4])
    assert (len(engine.aborted), len(engine.calls)) == (1, 1)


async def test_an_answer_after_the_end_is_not_recorded() -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with session_of(AgentEngine(lambda prompt, params: answer)) as session:
        task = asyncio.ensure_future(session.chat(user("a")))
        await asyncio.sleep(0)
        assert session.running == 1
        session.close(End.TIMEOUT)
        answer.set_result("x")
        with pytest.raises(SessionEndedError, match="timeout"):
            await task
        assert (session.exchanges, session.running) == ([], 0)


async def played(session: Session) -> list[Any]:
    """Three answers, of which the second and the third are equal."""
    return [await session.chat(user(text)) for text in "abc"]


async def test_the_reward_is_about_the_last_answer_or_the_one_that_the_agent_names() -> None:
    engine = AgentEngine(say("1", "2", "2"))
    async with session_of(engine) as session:
        first, second, third = await played(session)
        assert session.exchange_to_score() is third
        session.scored = f"chatcmpl-{first.id}"
        assert session.exchange_to_score() is first
        session.scored = {"role": "assistant", "content": "2"}
        assert session.exchange_to_score() is third
        session.scored = second.answer.message
        assert session.exchange_to_score() is second
        session.scored = "chatcmpl-none"
        with pytest.raises(AgentFailedError, match="chatcmpl-none"):
            session.exchange_to_score()


async def test_an_answer_without_tokens_is_never_what_the_reward_is_about() -> None:
    engine = AgentEngine()
    async with session_of(engine) as session:
        assert session.exchange_to_score() is None
        kept = await session.chat(user("a"))
        result = engine.result
        engine.result = lambda ids, reason: result([], reason)  # type: ignore[method-assign]
        empty = await session.chat(user("b"))
        assert session.exchange_to_score() is kept
        session.scored = empty.id
        with pytest.raises(AgentFailedError, match="no answer is"):
            session.exchange_to_score()


async def test_a_plain_agent_is_let_go_when_its_session_ends() -> None:
    engine = AgentEngine(lambda prompt, params: asyncio.Event().wait())
    async with session_of(engine) as session:
        handle = SessionHandle(session, "", "", blocking=True)
        thread = asyncio.ensure_future(asyncio.to_thread(handle.chat, user("a")))
        await engine.asked.wait()
        session.close(End.TIMEOUT)
        handle.close()
        with pytest.raises(SessionEndedError, match="timeout"):
            await thread
        await engine.ended.wait()
    assert len(engine.cancelled) == 1


async def test_an_async_agent_awaits_answers_and_a_plain_one_gets_them() -> None:
    async with session_of(AgentEngine(echo)) as session:
        awaited, plain = (SessionHandle(session, "", "", blocking=blocking) for blocking in (False, True))
        assert (await awaited.chat(user("4")))["content"] == "4"
        assert (await asyncio.to_thread(plain.chat, user("5")))["content"] == "5"
        turn = await awaited.generate([7, 8], max_tokens=1)
        assert (turn.prompt_ids, len(turn.output_ids)) == ((7, 8), 1)
        message = await awaited.chat(user("4"))
        awaited.score(message)
        plain_turn = await asyncio.to_thread(plain.generate, [9])
        assert plain_turn.prompt_ids == (9,)
        found = session.exchange_to_score()
        assert found is not None
        assert found.turn.ordinal == 1
