"""Anthropic's Messages, as Anthropic's client sees them: its strict validation is on, and a warning is an error."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from typing import Any

import anthropic
import httpx
import pytest

from buffer_rl.agents import gateway as gateway_module
from buffer_rl.agents.session import End
from buffer_rl.agents.turns import rows
from buffer_rl.errors import EngineError
from harness.agent_play import AgentEngine, anthropic_over, user

pytestmark = pytest.mark.filterwarnings("error")
CALLS = (
    'so<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "none_such", "arguments": {}}</tool_call>'
)
TOOLS: Any = [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {}}}}]
ASKED: Any = {"model": "any", "max_tokens": 500}


async def answered(client: Any, stream: bool, **asked: Any) -> Any:
    """The whole message, also of a stream."""
    if not stream:
        return await client.messages.create(**ASKED | asked)
    async with client.messages.stream(**ASKED | asked) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_what_was_sampled(stream: bool) -> None:
    async with anthropic_over(AgentEngine(lambda prompt, params: "two")) as (session, client):
        message = await answered(client, stream, messages=user("1+1"))
        (exchange,) = session.exchanges
    assert (message.id, message.role, message.model) == (f"msg_{exchange.id}", "assistant", "any")
    assert [(block.type, block.text) for block in message.content] == [("text", "two")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 4)


async def test_a_stream_has_the_events_of_the_protocol_in_their_order() -> None:
    async with anthropic_over(AgentEngine(lambda prompt, params: CALLS)) as (_, client):
        stream = await client.messages.create(**ASKED, messages=user("go"), tools=TOOLS, stream=True)
        kinds = [event.type async for event in stream]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, *block, "message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_calls_come_and_their_results_go_behind_the_same_ids(stream: bool) -> None:
    answers = iter([CALLS, "done"])
    engine = AgentEngine(lambda prompt, params: next(answers))
    async with anthropic_over(engine) as (session, client):
        message = await answered(client, stream, messages=user("go"), tools=TOOLS)
        assert message.stop_reason == "tool_use"
        text, *calls = message.content
        assert text.text == "so"
        assert [(call.name, call.input) for call in calls] == [("add", {"a": 1}), ("none_such", {})]
        results: list[Any] = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"} for call in calls]
        results[1] |= {"content": [{"type": "text", "text": "none"}], "is_error": True}
        told = [*results, {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}}]
        history = [*user("go"), message.to_param(), {"role": "user", "content": told}]
        await answered(client, stream, messages=history, tools=TOOLS)
        (row,) = rows(each.turn for each in session.exchanges)
    assert engine.prompts[0] == "Tadd,ugoa"
    assert engine.prompts[1] == f"Tadd,ugoa{CALLS}<eos>t3terror: noneuand?a"
    assert sum(row.loss_mask) == len(CALLS) + 1 + len("done") + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_a_block_if_the_client_asked_for_it_and_its_turn_is_found_either_way(stream: bool) -> None:
    hidden, shown = {"type": "adaptive", "display": "omitted"}, {"type": "enabled", "budget_tokens": 1024}
    for thinking in ({"type": "disabled"}, hidden, shown):
        engine = AgentEngine(lambda prompt, params: "<think>hm</think>two")
        async with anthropic_over(engine, agent_history="append") as (session, client):
            message = await answered(client, stream, messages=user("1+1"), thinking=thinking, max_tokens=2000)
            blocks = [(block.type, getattr(block, "thinking", "")) for block in message.content]
            assert blocks == ([("thinking", "hm"), ("text", "")] if thinking is shown else [("text", "")])
            history = [*user("1+1"), message.to_param(), *user("sure?")]
            await answered(client, stream, messages=history, thinking=thinking, max_tokens=2000)
            assert len(rows(each.turn for each in session.exchanges)) == 1


async def test_the_system_prompt_is_a_text_or_blocks() -> None:
    engine = AgentEngine()
    block = {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}
    async with anthropic_over(engine) as (_, client):
        await client.messages.create(**ASKED, messages=user("go"), system="S")
        await client.messages.create(**ASKED, messages=user("go"), system=[block], metadata={"user_id": "x"})
        await client.messages.create(**ASKED, messages=user("go"), system=[block, block])
    assert engine.prompts == ["sSugoa", "sSugoa", "sS\nSugoa"]


async def test_limits_of_the_client_reach_the_engine_and_end_an_answer() -> None:
    engine = AgentEngine(lambda prompt, params: "xxxxxxxx")
    async with anthropic_over(engine) as (_, client):
        message = await client.messages.create(model="any", max_tokens=2, messages=user("go"), stop_sequences=["!"])
        assert message.stop_reason == "max_tokens"
        assert [model.id async for model in client.models.list()] == ["policy"]
    ((_, _, params),) = engine.calls
    assert (params["max_new_tokens"], params["stop"]) == (2, ["!"])


async def test_a_stop_sequence_is_named() -> None:
    class Stops(AgentEngine):
        def result(self, ids: Any, reason: str) -> Any:
            return dataclasses.replace(super().result(ids, reason), matched="!")

    async with anthropic_over(Stops(lambda prompt, params: "hi!")) as (_, client):
        message = await client.messages.create(**ASKED, messages=user("go"), stop_sequences=["!"])
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "!", "hi")


async def test_tokens_are_counted_without_a_turn() -> None:
    async with anthropic_over(AgentEngine()) as (session, client):
        counted = await client.messages.count_tokens(model="any", messages=user("go"), system="S", tools=TOOLS)
        assert counted.input_tokens == len("Tadd,sSugoa")
        assert (session.exchanges, dict(session.causes)) == ([], {})
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.count_tokens(model="any", messages=[])


async def test_a_key_is_a_header_of_either_protocol() -> None:
    async with anthropic_over(AgentEngine()) as (_, client):
        bearer = client.with_options(api_key="wrong", default_headers={"authorization": f"Bearer {client.api_key}"})
        assert (await bearer.messages.create(**ASKED, messages=user("go"))).content[0].text == "x"
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.with_options(api_key="wrong").messages.create(**ASKED, messages=user("go"))
        assert caught.value.body == {
            "type": "error",
            "error": {"type": "authentication_error", "message": "the key is missing or wrong"},
        }


def tokens_of(number: int) -> dict[str, Any]:
    return {"rollout_max_context_len": number}


async def test_errors_have_the_bodies_and_the_statuses_of_the_protocol() -> None:
    def fails(prompt: str, params: dict[str, Any]) -> str:
        raise EngineError("it is gone")

    async def error_of(client: Any) -> tuple[int, dict[str, str]]:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(**ASKED, messages=user("123456"))
        return caught.value.status_code, caught.value.body["error"]  # type: ignore[index]

    async with anthropic_over(AgentEngine(), **tokens_of(8)) as (session, client):
        status, error = await error_of(client)
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert error["message"] == "prompt is too long: 8 tokens > 8 maximum"
        session.close(End.TURNS)
        status, error = await error_of(client)
        assert (status, error["type"]) == (410, "not_found_error")
    engine = AgentEngine(fails)
    async with anthropic_over(engine) as (_, client):
        status, error = await error_of(client)
        assert (status, error["type"], len(engine.calls)) == (502, "api_error", 1)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
REFUSED: list[dict[str, Any]] = [
    {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "tool", "name": "add"}},
    {"output_format": {"type": "json_schema", "schema": {}}},
    {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    {"max_tokens": 0},
    {"stop_sequences": [3]},
    {"system": 3},
    {"messages": []},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"messages": [{"role": "user", "content": [IMAGE]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}]},
    {"messages": [{"role": "user", "content": ["text"]}]},
    {"messages": [*user("go"), {"role": "assistant", "content": "prefilled"}]},
]


@pytest.mark.parametrize("changed", REFUSED, ids=json.dumps)
async def test_what_would_change_the_distribution_or_is_no_request_is_refused(changed: dict[str, Any]) -> None:
    engine = AgentEngine()
    async with anthropic_over(engine) as (_, client):
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**ASKED, messages=user("go"), tools=TOOLS, extra_body=changed)
    assert engine.calls == []


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
async def test_a_body_that_is_no_json_is_a_fault_of_the_request(path: str) -> None:
    async with anthropic_over(AgentEngine()) as (_, client), httpx.AsyncClient() as raw:
        url, headers = f"{client.base_url}v1/{path}", {"x-api-key": client.api_key}
        answer = await raw.post(url, content=b'{"messages": [', headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_tools_without_a_schema_are_left_out_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    engine = AgentEngine()
    search = {"type": "web_search_20250305", "name": "web_search"}
    with caplog.at_level(logging.WARNING, "buffer_rl.agents"):
        async with anthropic_over(engine) as (_, client):
            for choice in ("auto", "none"):
                asked = {"tools": [*TOOLS, search], "tool_choice": {"type": choice}}
                await client.messages.create(**ASKED, messages=user("go"), **asked)
    assert engine.prompts == ["Tadd,ugoa", "ugoa"]
    (notice,) = [record.getMessage() for record in caplog.records]
    assert notice.startswith("an agent's tool of type 'web_search_20250305' is ignored")


async def test_pings_keep_a_stream_alive_and_a_late_failure_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "KEEP_ALIVE_S", 0.01)
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with anthropic_over(AgentEngine(lambda prompt, params: answer)) as (_, client):
        body = {**ASKED, "messages": user("go"), "stream": True}
        raw, headers = httpx.AsyncClient(), {"x-api-key": client.api_key}
        async with raw, raw.stream("POST", f"{client.base_url}v1/messages", json=body, headers=headers) as got:
            lines = got.aiter_lines()
            assert [await anext(lines) for _ in range(3)] == ["event: ping", 'data: {"type": "ping"}', ""]
        stream = await client.messages.create(**body)
        answer.set_exception(EngineError("it is gone"))
        with pytest.raises(anthropic.APIStatusError, match="it is gone"):
            _ = [event async for event in stream]
