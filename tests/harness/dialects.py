"""One conversation in each dialect, by the clients that agents use, and a line that loses an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai

from buffer_rl.agents.gateway import Gateway
from buffer_rl.agents.session import Session
from harness.agent_play import AgentEngine, session_of

SYSTEM = "S"
SCHEMA: Any = {"type": "object", "properties": {"a": {}}}
CALLS = (
    '<think>hm</think>so<tool_call>{ "arguments":{"a":1.0}, "name":"add"}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)
"""An answer with reasoning and two calls, spelt as no client spells it."""
MOST = 100_000
"""A limit of tokens above the run's."""


@asynccontextmanager
async def address_over(engine: AgentEngine, **options: Any) -> AsyncIterator[tuple[Session, str, str]]:
    """A session behind a gateway, its URL and its key."""
    async with session_of(engine, **options) as session:
        gateway = Gateway(engine.tokenizer)
        try:
            async with gateway.opened(session) as (url, key):
                yield session, url, key
        finally:
            await gateway.aclose()


@asynccontextmanager
async def losing_line(url: str, num_lost: int = 1) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A URL like ``url`` whose connection breaks in the middle of the first ``num_lost`` answers; what was sent."""
    server_at, sent, left = urlsplit(url), list[bytes](), [num_lost]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(server_at.hostname, server_at.port)
        up = asyncio.ensure_future(_pass(reader, back, sent))
        with suppress(ConnectionError):
            while answer := await there.read(1 << 16):
                left[0] -= 1
                writer.write(answer[: len(answer) // 2] if left[0] >= 0 else answer)
                if left[0] >= 0:
                    break
                await writer.drain()
        up.cancel()
        back.close()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}{server_at.path}", sent
    finally:
        server.close()  # without waiting for connections, as ``async with`` does from Python 3.12 on


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: list[bytes]) -> None:
    with suppress(ConnectionError):
        while asked := await reader.read(1 << 16):
            sent.append(asked)
            writer.write(asked)
            await writer.drain()


async def chat(url: str, key: str, stream: bool, says: list[str]) -> None:
    """By OpenAI's chat completions."""
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    async with openai.AsyncOpenAI(base_url=url, api_key=key, _strict_response_validation=True) as client:
        for said in says:
            messages.append({"role": "user", "content": said})
            while True:
                if stream:
                    async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                        answer = (await events.get_final_completion()).choices[0].message
                else:
                    whole = await client.chat.completions.create(model="m", messages=messages, tools=tools)
                    answer = whole.choices[0].message  # type: ignore[assignment]
                messages.append(answer.model_dump(exclude_none=True, exclude={"parsed"}))
                for number, call in enumerate(answer.tool_calls or ()):
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(number)})
                if not answer.tool_calls:
                    break


async def messages(url: str, key: str, stream: bool, says: list[str]) -> None:
    """By Anthropic's Messages."""
    asked: Any = {"model": "m", "max_tokens": MOST, "system": SYSTEM}
    asked["tools"] = [{"name": "add", "input_schema": SCHEMA}]
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    history: list[Any] = []
    root = url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(
        base_url=root, api_key=key, timeout=120, _strict_response_validation=True
    ) as client:
        for said in says:
            history.append({"role": "user", "content": said})
            while True:
                if stream:
                    async with client.messages.stream(**asked, messages=history) as events:
                        answer = await events.get_final_message()
                else:
                    answer = await client.messages.create(**asked, messages=history)
                calls = [block for block in answer.content if block.type == "tool_use"]
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": str(number)}
                    for number, call in enumerate(calls)
                ]
                history.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
                if not calls:
                    break
                history.append({"role": "user", "content": results})


async def responses(url: str, key: str, stream: bool, says: list[str], *, kept: bool = False) -> None:
    """By OpenAI's responses. kept: by the id of the response before, instead of the whole history."""
    asked: Any = {"model": "m", "instructions": SYSTEM}
    asked["tools"] = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    history: list[Any] = []
    async with openai.AsyncOpenAI(base_url=url, api_key=key, _strict_response_validation=True) as client:
        for said in says:
            history.append({"role": "user", "content": said})
            while True:
                if stream:
                    async with client.responses.stream(**asked, input=history) as events:
                        answer = await events.get_final_response()
                else:
                    answer = await client.responses.create(**asked, input=history)  # type: ignore[assignment]
                results = [
                    {"type": "function_call_output", "call_id": item.call_id, "output": str(number)}
                    for number, item in enumerate(i for i in answer.output if i.type == "function_call")
                ]
                items = [json.loads(item.model_dump_json(exclude={"parsed_arguments"})) for item in answer.output]
                history = results if kept else [*history, *items, *results]
                if kept:
                    asked["previous_response_id"] = answer.id
                if not results:
                    break


async def kept_responses(url: str, key: str, stream: bool, says: list[str]) -> None:
    """By OpenAI's responses, each after the one before it."""
    await responses(url, key, stream, says, kept=True)


DIALECTS: dict[str, Callable[[str, str, bool, list[str]], Awaitable[None]]] = {
    "chat": chat,
    "messages": messages,
    "responses": responses,
    "kept responses": kept_responses,
}
