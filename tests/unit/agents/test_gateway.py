"""The gateway over HTTP, as OpenAI's client sees it: its strict validation is on, and a warning is an error."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

from buffer_rl.agents import gateway as gateway_module
from buffer_rl.agents.session import AgentFailedError, End
from buffer_rl.agents.turns import rows
from buffer_rl.errors import EngineError
from harness.agent_play import AgentEngine, client_over, user

pytestmark = pytest.mark.filterwarnings("error")
CALLS = (
    'so<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "none_such", "arguments": {}}</tool_call>'
)
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
]


def never(prompt: str, params: dict[str, Any]) -> Any:
    return asyncio.Event().wait()


async def test_a_completion_is_what_was_sampled() -> None:
    engine = AgentEngine(lambda prompt, params: "two")
    async with client_over(engine) as (session, client):
        answer = await client.chat.completions.create(model="any", messages=user("1+1"), logprobs=True)
        (exchange,) = session.exchanges
    (choice,) = answer.choices
    assert answer.id == f"chatcmpl-{exchange.id}"
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("two", "assistant", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 4, 9)
    assert [(each.token, each.logprob) for each in choice.logprobs.content] == [
        ("t", -0.5),
        ("w", -0.5),
        ("o", -0.5),
        ("<eos>", -0.5),
    ]


async def test_a_stream_has_the_same_answer_and_its_usage_if_it_is_asked_for() -> None:
    async def streamed(client: Any, **options: Any) -> list[Any]:
        stream = await client.chat.completions.create(model="any", messages=user("1+1"), stream=True, **options)
        return [chunk async for chunk in stream]

    async with client_over(AgentEngine(lambda prompt, params: "two")) as (session, client):
        chunks = await streamed(client)
        with_usage = await streamed(client, stream_options={"include_usage": True}, logprobs=True)
        assert len(session.exchanges) == 2
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["two", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]
    assert [chunk.usage for chunk in chunks] == [None, None]
    assert with_usage[-1].choices == []
    assert with_usage[-1].usage.total_tokens == 9
    assert len(with_usage[0].choices[0].logprobs.content) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_calls_also_of_an_unknown_tool_come_and_go_as_they_were_sampled(stream: bool) -> None:
    answers = iter([CALLS, "done"])
    engine = AgentEngine(lambda prompt, params: next(answers))
    async with client_over(engine) as (session, client):
        asked = {"model": "any", "messages": user("go"), "tools": TOOLS}
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                completion = await events.get_final_completion()
        else:
            completion = await client.chat.completions.create(**asked)
        message = completion.choices[0].message
        assert completion.choices[0].finish_reason == "tool_calls"
        assert message.content == "so"
        calls = message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("add", {"a": 1}),
            ("none_such", {}),
        ]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
        said = {"role": "assistant", "content": message.content, "tool_calls": [call.model_dump() for call in calls]}
        await client.chat.completions.create(**{**asked, "messages": [*user("go"), said, *results]})
        (row,) = rows(each.turn for each in session.exchanges)
    assert engine.prompts[0] == "Tadd,ugoa"
    assert engine.prompts[1] == f"Tadd,ugoa{CALLS}<eos>t3t3a"
    assert sum(row.loss_mask) == len(CALLS) + 1 + len("done") + 1


async def test_several_answers_to_one_request_are_siblings() -> None:
    answers = iter("abc")
    engine = AgentEngine(lambda prompt, params: next(answers))
    async with client_over(engine) as (session, client):
        answer = await client.chat.completions.create(model="any", messages=user("go"), n=3, logprobs=True)
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 6
        assert len(rows(each.turn for each in session.exchanges)) == 3
    assert len({params["sampling_seed"] for _, _, params in engine.calls}) == 3


async def test_limits_of_the_client_reach_the_engine_and_models_are_listed() -> None:
    engine = AgentEngine(lambda prompt, params: "xxxxxxxx")
    async with client_over(engine) as (_, client):
        answer = await client.chat.completions.create(model="any", messages=user("go"), max_tokens=2, stop="!")
        await client.chat.completions.create(model="any", messages=user("go"), max_completion_tokens=3, stop=["?"])
        assert answer.choices[0].finish_reason == "length"
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
    assert [(params["max_new_tokens"], params["stop"]) for _, _, params in engine.calls] == [(2, ["!"]), (3, ["?"])]


async def test_a_wrong_key_is_refused() -> None:
    async with client_over(AgentEngine()) as (session, client):
        with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
            await ask(client.with_options(api_key="other"))
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="other").models.list()
        assert session.exchanges == []


class Line:
    """What a client sends and receives. sent: the numbers of the repetitions; num_lost: answers that do not come."""

    def __init__(self, num_lost: int = 0) -> None:
        self.sent: list[str] = []
        self._num_lost = num_lost
        hooks: dict[str, list[Any]] = {"request": [self._send], "response": [self._receive]}
        self.http = openai.DefaultAsyncHttpxClient(event_hooks=hooks)

    async def _send(self, request: Any) -> None:
        self.sent.append(request.headers["x-stainless-retry-count"])

    async def _receive(self, response: Any) -> None:
        if self._num_lost:
            self._num_lost -= 1
            raise httpx.ReadError("lost")


async def test_after_the_end_a_session_is_gone_and_the_client_does_not_repeat() -> None:
    line = Line()
    async with client_over(AgentEngine()) as (session, client), line.http:
        counted = client.with_options(http_client=line.http)
        session.close(End.TURNS)
        with pytest.raises(openai.APIStatusError, match="max_turns") as caught:
            await counted.chat.completions.create(model="any", messages=user("go"))
        assert (caught.value.status_code, caught.value.code) == (410, "session_ended")
    assert line.sent == ["0"]


async def test_a_session_that_is_over_or_never_was_is_gone_and_is_counted_as_late() -> None:
    gateway = gateway_module.Gateway(AgentEngine().tokenizer)
    async with client_over(AgentEngine()) as (session, _):
        async with gateway.opened(session) as (url, key):
            pass
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as late:
            for asks in (ask, lambda client: client.models.retrieve("policy")):
                with pytest.raises(openai.APIStatusError) as caught:
                    await asks(late)
                assert caught.value.status_code == 410
        assert (gateway.take_late(), gateway.take_late()) == (2, 0)
    await gateway.aclose()


async def test_requests_that_run_at_the_end_are_answered_with_410_and_cancelled() -> None:
    engine, line = AgentEngine(never), Line()
    async with client_over(engine) as (session, client), line.http:
        gateway = gateway_module.Gateway(engine.tokenizer)
        async with gateway.opened(session) as (url, key):
            own = client.with_options(base_url=url, api_key=key, http_client=line.http)
            tasks = []
            for _ in range(2):
                engine.asked.clear()
                tasks.append(asyncio.ensure_future(ask(own)))
                await engine.asked.wait()
        for task in tasks:
            with pytest.raises(openai.APIStatusError) as caught:
                await task
            assert caught.value.status_code == 410
        await gateway.aclose()
    assert (len(engine.cancelled), line.sent) == (2, ["0", "0"])


async def ask(
    client: Any, *, repeats: bool = False, headers: dict[str, str] | None = None, **options: Any
) -> tuple[str, str]:
    """Id and text of the answer. repeats: the request is marked as a repetition."""
    headers = {**(headers or {}), **({"x-stainless-retry-count": "1"} if repeats else {})}
    answer = await client.chat.completions.create(model="any", messages=user("go"), extra_headers=headers, **options)
    return answer.id, answer.choices[0].message.content


async def test_a_marked_repetition_gets_the_recorded_answer_and_an_unmarked_one_a_new() -> None:
    answers = iter("abc")
    engine = AgentEngine(lambda prompt, params: next(answers))
    async with client_over(engine) as (session, client):
        first = await ask(client)
        assert await ask(client, repeats=True) == first
        second = await ask(client)
        assert (first[1], second[1]) == ("a", "b")
        assert len(session.exchanges) == len(engine.calls) == 2


@pytest.mark.parametrize("num_before", [0, 2])
async def test_a_repetition_of_no_known_request_or_of_one_of_several_is_refused_and_not_repeated(
    num_before: int,
) -> None:
    engine, line = AgentEngine(), Line()
    async with client_over(engine) as (session, client), line.http:
        for _ in range(num_before):
            await ask(client)
        for _ in range(2):
            with pytest.raises(openai.ConflictError, match="is unknown") as caught:
                await ask(client.with_options(http_client=line.http), repeats=True)
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert len(session.exchanges) == len(engine.calls) == num_before
        assert len(line.sent) == 2
        await ask(client, max_tokens=5)  # what was refused was not asked
        await ask(client, max_tokens=5, repeats=True)


async def test_a_repetition_of_one_that_runs_beside_one_that_was_answered_waits_for_it() -> None:
    held: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    answers: Any = iter(["a", held])
    engine = AgentEngine(lambda prompt, params: next(answers))
    async with client_over(engine) as (session, client):
        first = await ask(client)
        engine.asked.clear()
        running = asyncio.ensure_future(ask(client))
        await engine.asked.wait()
        again = asyncio.ensure_future(ask(client, repeats=True))
        await asyncio.wait({again}, timeout=0.05)
        held.set_result("b")
        assert await again == await running != first
        assert len(session.exchanges) == len(engine.calls) == 2


async def test_equal_requests_are_told_apart_by_their_names() -> None:
    engine = AgentEngine(lambda prompt, params: str(params["sampling_seed"] % 1000))

    def named(client: Any, name: str, **options: Any) -> Any:
        return ask(client, headers={"x-buffer-rl-call": name}, **options)

    async with client_over(engine) as (session, client):
        found = await asyncio.gather(*(named(client, name) for name in "abab"))
        assert found[:2] == found[2:]
        assert await named(client, "b", repeats=True) == found[1]
        assert len(session.exchanges) == len(engine.calls) == 2
        lost = await named(client, "c", repeats=True)  # its first try never came
        assert lost == await named(client, "c")
        siblings = await client.chat.completions.create(
            model="any", messages=user("go"), n=2, extra_headers={"x-buffer-rl-call": "d"}
        )
        assert len({choice.message.content for choice in siblings.choices}) == 2
    async with client_over(engine) as (session, client):
        others = await asyncio.gather(*(named(client, name) for name in "ba"))
        assert others == [found[1], found[0]]
        assert len({each.turn.digest for each in session.exchanges}) == 2


async def test_what_the_client_repeats_by_itself_is_one_turn() -> None:
    line, answers = Line(num_lost=1), iter("ab")
    async with client_over(AgentEngine(lambda prompt, params: next(answers))) as (session, client), line.http:
        _, text = await ask(client.with_options(http_client=line.http))
        assert (line.sent, text, len(session.exchanges)) == (["0", "1"], "a", 1)


async def test_a_repetition_while_the_first_request_runs_waits_for_its_answer() -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = AgentEngine(lambda prompt, params: answer)
    async with client_over(engine) as (session, client):
        first = asyncio.ensure_future(ask(client))
        await engine.asked.wait()
        second = asyncio.ensure_future(ask(client, repeats=True))
        await asyncio.wait({second}, timeout=0.05)
        answer.set_result("x")
        assert await first == await second
        assert len(session.exchanges) == len(engine.calls) == 1


async def test_the_answer_to_a_client_that_went_away_is_recorded() -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = AgentEngine(lambda prompt, params: answer)
    async with client_over(engine) as (session, client):
        for options in ({"stream": True}, {}):
            engine.asked.clear()
            task = asyncio.ensure_future(ask(client, **options))
            await engine.asked.wait()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert session.exchanges == []
        answer.set_result("x")
        again = await ask(client, repeats=True)
        assert [each.turn.output_ids for each in session.exchanges] == [(*engine.tokenizer.encode("x"), 1)] * 2
        assert again[0] == f"chatcmpl-{session.exchanges[1].id}"
    assert (len(engine.calls), engine.cancelled) == (2, [])


async def test_comments_keep_a_stream_alive_until_its_answer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "KEEP_ALIVE_S", 0.01)
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with client_over(AgentEngine(lambda prompt, params: answer)) as (_, client):
        body = {"model": "any", "messages": user("go"), "stream": True}
        raw = httpx.AsyncClient()
        headers = {"authorization": f"Bearer {client.api_key}"}
        async with raw, raw.stream("POST", f"{client.base_url}chat/completions", json=body, headers=headers) as got:
            lines = got.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            answer.set_result("x")
            rest = [line async for line in lines if line.startswith("data")]
        assert rest[-1] == "data: [DONE]"
        stream = await client.chat.completions.create(**body)
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["x", None]


async def test_a_late_stream_that_fails_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "KEEP_ALIVE_S", 0.01)
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with client_over(AgentEngine(lambda prompt, params: answer)) as (session, client):
        stream = await client.chat.completions.create(model="any", messages=user("go"), stream=True)
        answer.set_exception(EngineError("it is gone"))
        with pytest.raises(openai.APIError, match="it is gone"):
            _ = [chunk async for chunk in stream]
        assert session.end is End.ENGINE


async def test_the_failure_of_an_engine_is_not_repeated_by_the_client() -> None:
    def fails(prompt: str, params: dict[str, Any]) -> str:
        raise EngineError("it is gone")

    engine, line = AgentEngine(fails), Line()
    async with client_over(engine) as (session, client), line.http:
        counted = client.with_options(http_client=line.http)
        with pytest.raises(openai.InternalServerError, match="it is gone") as caught:
            await counted.chat.completions.create(model="any", messages=user("go"), n=2)
        assert caught.value.code == "engine_failed"
        assert isinstance(session.failure, EngineError)
    assert line.sent == ["0"]


async def test_messages_that_are_too_long_have_the_code_that_frameworks_look_for() -> None:
    async with client_over(AgentEngine(), rollout_max_context_len=8) as (_, client):
        for n in (1, 2):
            with pytest.raises(openai.BadRequestError, match="maximum context length is 8 tokens") as caught:
                await client.chat.completions.create(model="any", messages=user("123456"), n=n)
            assert caught.value.code == "context_length_exceeded"


async def test_other_values_of_sampling_are_ignored_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    engine = AgentEngine()
    with caplog.at_level(logging.WARNING, "buffer_rl.agents"):
        async with client_over(engine, rollout_temperature=0.7, rollout_top_k=4) as (_, client):
            for _ in range(2):
                await client.chat.completions.create(
                    model="any", messages=user("go"), temperature=0.2, top_p=1.0, extra_body={"top_k": 4}, seed=3
                )
    assert [params["temperature"] for _, _, params in engine.calls] == [0.7, 0.7]
    notices = [record.getMessage() for record in caplog.records]
    assert notices == [f"an agent's {each} is ignored: sampling is the run's" for each in ("temperature=0.2", "seed=3")]


REFUSED: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": 1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"5": 1}},
    {"response_format": {"type": "json_object"}},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    {"functions": [{"name": "add"}]},
    {"n": 0},
    {"n": 129},
    {"max_tokens": 0},
    {"max_tokens": 1.5},
    {"stop": 3},
    {"stop": [""]},
    {"stream_options": "x"},
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"content": "no role"}]},
    {"tools": {}},
]


@pytest.mark.parametrize("changed", REFUSED, ids=json.dumps)
async def test_what_would_change_the_distribution_or_is_no_request_is_refused(changed: dict[str, Any]) -> None:
    engine = AgentEngine()
    async with client_over(engine) as (session, client):
        body = {"messages": user("go"), "extra_body": changed}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="any", **body)
        assert caught.value.code == "invalid_request"
        assert session.end is None
    assert engine.calls == []


async def test_what_changes_nothing_is_accepted() -> None:
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}}
    engine = AgentEngine()
    async with client_over(engine) as (_, client):
        await client.chat.completions.create(model="any", messages=user("go"), tool_choice="auto", **neutral)
        await client.chat.completions.create(model="any", messages=user("go"), tools=TOOLS, tool_choice="none")
    assert engine.prompts == ["ugoa", "ugoa"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    async with client_over(AgentEngine()) as (_, client), httpx.AsyncClient() as raw:
        headers = {"authorization": f"Bearer {client.api_key}"}
        answer = await raw.post(f"{client.base_url}chat/completions", content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


async def test_an_answer_that_its_header_excludes_is_context_and_another_value_is_refused() -> None:
    """Of three turns of one conversation the second is another player's: its tokens are in the row, and masked."""
    texts = iter("pqr")
    async with client_over(AgentEngine(lambda prompt, params: next(texts))) as (session, client):
        messages: list[Any] = []
        for number, value in enumerate(("true", "false", None)):
            messages += user(str(number))
            headers = {} if value is None else {"x-buffer-rl-train": value}
            answer = await client.chat.completions.create(model="any", messages=messages, extra_headers=headers)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        with pytest.raises(openai.BadRequestError, match="x-buffer-rl-train is 'no'; expected: true or false"):
            await client.chat.completions.create(
                model="any", messages=messages, extra_headers={"x-buffer-rl-train": "no"}
            )
        assert [each.train for each in session.exchanges] == [True, False, True]
        assert session.exchange_to_score() is session.exchanges[2]
        session.scored = session.exchanges[1].id
        with pytest.raises(AgentFailedError, match="a completion that is trained"):
            session.exchange_to_score()
