"""OpenAI's responses, as OpenAI's client sees them: its strict validation is on, and a warning is an error."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from typing import Any

import openai
import pytest

from buffer_rl.agents import gateway as gateway_module
from buffer_rl.agents.responses_dialect import read
from buffer_rl.agents.session import End
from buffer_rl.agents.turns import rows
from buffer_rl.errors import EngineError
from harness.agent_play import AgentEngine, client_over, user

pytestmark = pytest.mark.filterwarnings("error")
CALLS = (
    'so<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "none_such", "arguments": {}}</tool_call>'
)
TOOLS: Any = [
    {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}, "strict": False}
]


async def answered(client: Any, stream: bool, **asked: Any) -> Any:
    """The whole response, also of a stream."""
    if not stream:
        return await client.responses.create(model="any", **asked)
    async with client.responses.stream(model="any", **asked) as events:
        return await events.get_final_response()


def given(response: Any) -> list[dict[str, Any]]:
    """The items of a response as a client sends them back."""
    return [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_what_was_sampled(stream: bool) -> None:
    async with client_over(AgentEngine(lambda prompt, params: "two")) as (session, client):
        response = await answered(client, stream, input="1+1", instructions="S", store=False)
        (exchange,) = session.exchanges
    assert (response.id, response.status, response.model) == (f"resp_{exchange.id}", "completed", "any")
    assert response.output_text == "two"
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 4, 11)


async def test_a_stream_has_the_events_of_the_protocol_in_their_order() -> None:
    async with client_over(AgentEngine(lambda prompt, params: f"<think>hm</think>{CALLS}")) as (_, client):
        stream = await client.responses.create(model="any", input=user("go"), tools=TOOLS, stream=True)
        found = [event async for event in stream]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    item = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    reasoning, text = ([each.format(name) for each in item] for name in ("reasoning_text", "output_text"))
    expected = ["created", "in_progress", *reasoning, *text, *call, *call, "completed"]
    assert [event.type for event in found] == [f"response.{name}" for name in expected]


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_calls_come_and_their_results_go_behind_the_same_ids(stream: bool) -> None:
    answers = iter([CALLS, "done"])
    engine = AgentEngine(lambda prompt, params: next(answers))
    async with client_over(engine) as (session, client):
        response = await answered(client, stream, input=user("go"), tools=TOOLS)
        assert response.output_text == "so"
        calls = [item for item in response.output if item.type == "function_call"]
        found = [(call.name, json.loads(call.arguments)) for call in calls]
        assert found == [("add", {"a": 1}), ("none_such", {})]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
        await answered(client, stream, input=[*user("go"), *given(response), *results], tools=TOOLS)
        (row,) = rows(each.turn for each in session.exchanges)
    assert engine.prompts == ["Tadd,ugoa", f"Tadd,ugoa{CALLS}<eos>t3t3a"]
    assert sum(row.loss_mask) == len(CALLS) + 1 + len("done") + 1


@pytest.mark.parametrize("keeps", [False, True])
async def test_reasoning_is_an_item_and_its_turn_is_found_with_and_without_it(keeps: bool) -> None:
    engine = AgentEngine(lambda prompt, params: "<think>hm</think>two")
    async with client_over(engine, agent_history="append") as (session, client):
        response = await client.responses.create(model="any", input="1+1")
        assert [item.type for item in response.output] == ["reasoning", "message"]
        history = [item for item in given(response) if keeps or item["type"] != "reasoning"]
        await client.responses.create(model="any", input=[*user("1+1"), *history, *user("sure?")])
        assert len(rows(each.turn for each in session.exchanges)) == 1


async def test_a_previous_response_is_gone_on_from_without_its_instructions() -> None:
    engine = AgentEngine(lambda prompt, params: "two")
    async with client_over(engine) as (_, client):
        first = await client.responses.create(model="any", input="1+1", instructions="S")
        second = await client.responses.create(model="any", input="why", previous_response_id=first.id)
        asked = {"previous_response_id": second.id, "instructions": "T"}
        third = await client.responses.create(model="any", input="so", **asked)
        assert third.previous_response_id == second.id
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="any", input="so", previous_response_id="resp_x")
    two = "atwo<eos>"
    assert engine.prompts == ["sSu1+1a", f"u1+1{two}uwhya", f"sTu1+1{two}uwhy{two}usoa"]


async def test_a_custom_tool_is_a_function_of_one_text() -> None:
    call = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    answers = iter([call, call, "done"])
    engine = AgentEngine(lambda prompt, params: next(answers))
    tools: Any = [{"type": "custom", "name": "patch", "description": "changes files"}]
    async with client_over(engine) as (session, client):
        response = await client.responses.create(model="any", input="go", tools=tools)
        streamed = await client.responses.create(model="any", input="go", tools=tools, stream=True)
        ended = [event async for event in streamed][-1]
        assert ended.response.output[0].input == "*** Begin"
        (item,) = response.output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", "*** Begin")
        result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}
        await client.responses.create(model="any", input=[*user("go"), *given(response), result], tools=tools)
        assert len(rows(each.turn for each in session.exchanges)) == 2
    assert engine.prompts[2] == f"Tpatch,ugoa{call}<eos>toka"


async def test_a_limit_of_the_client_makes_an_answer_incomplete() -> None:
    engine = AgentEngine(lambda prompt, params: "xxxxxxxx")
    async with client_over(engine) as (_, client):
        response = await client.responses.create(model="any", input="go", max_output_tokens=2)
        stream = await client.responses.create(model="any", input="go", max_output_tokens=2, stream=True)
        last = [event async for event in stream][-1]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert last.type == "response.incomplete"
    assert [params["max_new_tokens"] for _, _, params in engine.calls] == [2, 2]


REFUSED: list[dict[str, Any]] = [
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "name": "add"}},
    {"text": {"format": {"type": "json_object"}}},
    {"background": True},
    {"conversation": "c"},
    {"prompt": {"id": "p"}},
    {"max_output_tokens": 0},
    {"input": []},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/x.png"}]}]},
    {"input": [{"type": "item_reference", "id": "x"}]},
    {"input": [{"content": "no role"}]},
    {"instructions": 3},
]


@pytest.mark.parametrize("changed", REFUSED, ids=json.dumps)
async def test_what_would_change_the_distribution_or_is_no_request_is_refused(changed: dict[str, Any]) -> None:
    engine = AgentEngine()
    async with client_over(engine) as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="any", input="go", tools=TOOLS, extra_body=changed)
        assert caught.value.code == "invalid_request"
    assert engine.calls == []


async def test_tools_that_are_no_functions_are_left_out_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    engine = AgentEngine()
    search: Any = {"type": "web_search"}
    with caplog.at_level(logging.WARNING, "buffer_rl.agents"):
        async with client_over(engine) as (_, client):
            for choice in ("auto", "none"):
                asked = {"tools": [*TOOLS, search], "tool_choice": choice, "text": {"format": {"type": "text"}}}
                await client.responses.create(model="any", input="go", **asked)
    assert engine.prompts == ["Tadd,ugoa", "ugoa"]
    (notice,) = [record.getMessage() for record in caplog.records]
    assert notice.startswith("an agent's tool of type 'web_search' is ignored")


async def test_errors_have_their_codes_also_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "KEEP_ALIVE_S", 0.01)
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with client_over(AgentEngine(lambda prompt, params: answer), rollout_max_context_len=8) as (session, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="any", input="123456")
        assert caught.value.code == "context_length_exceeded"
        stream = await client.responses.create(model="any", input="12", stream=True)
        answer.set_exception(EngineError("it is gone"))
        with pytest.raises(openai.APIError, match="it is gone"):
            _ = [event async for event in stream]
        assert session.end is End.ENGINE
        with pytest.raises(openai.APIStatusError) as ended:
            await client.responses.create(model="any", input="12")
        assert ended.value.status_code == 410


def test_items_that_follow_each_other_are_one_answer_until_another_begins() -> None:
    def said(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    messages = read({"input": [*user("go"), reasoning, said("a"), call, said("b"), said("c")]}).messages
    assert [message.get("content") for message in messages] == ["go", "a", "b", "c"]
    assert (messages[1]["reasoning_content"], len(messages[1]["tool_calls"])) == ("hm", 1)
    assert [each["role"] for each in messages[1:]] == ["assistant"] * 3


async def test_a_failure_that_no_client_waits_for_is_not_logged_by_asyncio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_module, "KEEP_ALIVE_S", 0.01)
    logged: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = AgentEngine(lambda prompt, params: answer)
    async with client_over(engine) as (session, client):
        stream = await client.responses.create(model="any", input="go", stream=True)
        await stream.close()
        answer.set_exception(EngineError("it is gone"))
        await session.ended
    gc.collect()
    assert logged == []
