"""OpenAI's responses for a session: what a request asks, and the bodies of its answer. Pure data."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count as numbers
from typing import Any

from buffer_rl.agents import dialect
from buffer_rl.agents.dialect import Dialect, Event, Refusal, Request
from buffer_rl.agents.messages import Message, reasoning_of
from buffer_rl.agents.session import Exchange
from buffer_rl.errors import DataError

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "format": ({"type": "text"},),
    "background": (False,),
    "conversation": (),
    "prompt": (),
}
_TEXT = ("input_text", "output_text", "text")
_REASONING = ("reasoning_text", "summary_text", "text")
_INPUT = "input"
"""The one argument of a custom tool, which takes a text."""
_INSTRUCTIONS = "instructions"
"""Marks the message that a request's instructions are: a later request does not inherit it."""


def read(body: dict[str, Any], exchanges: Sequence[Exchange] = ()) -> Request:
    """See ``Dialect``. The protocol's other fields have no influence."""
    text = body.get("text") if isinstance(body.get("text"), Mapping) else {}
    dialect.require_neutral({**body, "format": (text or {}).get("format")}, _NEUTRAL)
    messages: list[Message] = []
    if instructions := dialect.text_of_parts(body.get("instructions"), _TEXT, "instructions"):
        messages.append({"role": "system", "content": instructions, _INSTRUCTIONS: True})
    messages += _before(body.get("previous_response_id"), exchanges)
    asked, added = body.get("input"), list[Message]()
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else dialect.listed(body, "input")
    for number, item in enumerate(items):
        _add(added, item, f"input {number}")
    tools, others = [], []
    for tool in dialect.listed(body, "tools") if body.get("tool_choice") != "none" else []:
        if tool.get("type") == "function":
            tools.append(dialect.function_tool(tool.get("name"), tool.get("description"), tool.get("parameters")))
        elif tool.get("type") == "custom":
            schema = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
            tools.append(dialect.function_tool(tool.get("name"), tool.get("description"), schema))
        else:
            others.append(f"tool of type {tool.get('type')!r}")
    return Request(
        messages=[*messages, *added],
        tools=tools,
        max_tokens=dialect.count(body, "max_output_tokens"),
        body=body,
        left_out=tuple(others),
    )


def whole(exchanges: Sequence[Exchange], request: Request, tokenizer: Any) -> dict[str, Any]:
    """See ``Dialect``."""
    (exchange,) = exchanges
    turn, cut = exchange.turn, exchange.reply.finish_reason == "length"
    return {
        **_head(exchange, request),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(exchange, request),
        "usage": {
            "input_tokens": len(turn.prompt_ids),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(turn.output_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(turn.prompt_ids) + len(turn.output_ids),
        },
    }


def events(exchanges: Sequence[Exchange], request: Request, tokenizer: Any) -> list[Event]:
    """See ``Dialect``."""
    response = whole(exchanges, request, tokenizer)
    begun = {**_head(exchanges[0], request), "status": "in_progress", "incomplete_details": None, "output": []}
    begun["usage"] = None
    found: list[Event] = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    for place, item in enumerate(response["output"]):
        found += _events_of(item, place)
    found.append({"type": f"response.{response['status']}", "response": response})
    return [{**event, "sequence_number": number} for number, event in zip(numbers(), found, strict=False)]


def error(refusal: Refusal) -> dict[str, Any]:
    """See ``Dialect``; it is an event of a stream too."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    said = {"message": refusal.what, "code": refusal.code, "param": None}
    return {"error": {**said, "type": kind}, "type": "error", **said, "sequence_number": 0}


def _before(name: Any, exchanges: Sequence[Exchange]) -> list[Message]:
    """The conversation up to the answer that ``previous_response_id`` names, without its instructions."""
    if name is None:
        return []
    found = next((each for each in exchanges if isinstance(name, str) and name == f"resp_{each.id}"), None)
    if found is None or found.answer is None:
        raise DataError(f"'previous_response_id' is {name!r:.80}", expected="the id of a response of this session")
    return [*(each for each in found.messages if _INSTRUCTIONS not in each), found.answer.message]


def _add(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Add an item to a conversation. Reasoning, text and calls that follow each other are one answer."""
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") == "assistant":
        answer = _answer(messages, begun_by=("content", "tool_calls"))
        answer["content"] = dialect.text_of_parts(item.get("content"), _TEXT, where) or None
    elif kind == "message":
        messages.append({"role": item.get("role"), "content": dialect.text_of_parts(item.get("content"), _TEXT, where)})
    elif kind == "reasoning":
        said = dialect.text_of_parts(item.get("content") or item.get("summary"), _REASONING, where)
        _answer(messages, begun_by=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = said
    elif kind in ("function_call", "custom_tool_call"):
        given = item.get("arguments") if kind == "function_call" else json.dumps({_INPUT: item.get(_INPUT)})
        function = {"name": item.get("name"), "arguments": given}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _answer(messages).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = dialect.text_of_parts(item.get("output"), _TEXT, where)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    else:
        raise DataError(f"an item of type {kind!r:.80}", where=where, expected="a message, reasoning, or a function's")


def _answer(messages: list[Message], begun_by: Sequence[str] = ()) -> Message:
    """The answer that the last message is, if it has none of ``begun_by`` yet; else a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in begun_by):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _head(exchange: Exchange, request: Request) -> dict[str, Any]:
    shown = []
    for tool in request.tools:
        function = {"description": None, "parameters": None, **tool["function"]}
        shown.append({"type": "function", **function, "strict": False})
    return {
        "id": f"resp_{exchange.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "error": None,
        "instructions": request.body.get("instructions"),
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": request.body.get("previous_response_id"),
        "temperature": None,
        "tool_choice": request.body.get("tool_choice") or "auto",
        "tools": shown,
        "top_p": None,
    }


def _items(exchange: Exchange, request: Request) -> list[dict[str, Any]]:
    """Reasoning, text and calls of an answer, each an item."""
    message, items = exchange.reply.message, []
    custom = {tool.get("name") for tool in dialect.listed(request.body, "tools") if tool.get("type") == "custom"}
    if reasoning := reasoning_of(message):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{exchange.id}", "summary": [], "content": content})
    if message["content"]:
        text = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{exchange.id}", "role": "assistant", "content": [text]})
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        own = {"id": f"fc_{call['id']}", "call_id": call["id"], "name": name}
        if name in custom:
            given = json.loads(arguments)
            written = given[_INPUT] if isinstance(given.get(_INPUT), str) else arguments
            items.append({"type": "custom_tool_call", **own, _INPUT: written})
        else:
            items.append({"type": "function_call", **own, "arguments": arguments})
    return [{**item, "status": "completed"} for item in items]


def _events_of(item: dict[str, Any], place: int) -> Iterator[Event]:
    at = {"output_index": place}
    within = {**at, "item_id": item["id"]}
    content, field = item.get("content"), "arguments" if item["type"] == "function_call" else _INPUT
    unwritten: Event = {"content": []} if content else {field: ""}
    empty = {**item, "status": "in_progress", **unwritten}
    yield {"type": "response.output_item.added", **at, "item": empty}
    for part in content or ():
        kind, spot = f"response.{part['type']}", {**within, "content_index": 0}
        logprobs: Event = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": "response.content_part.added", **spot, "part": {**part, "text": ""}}
        yield {"type": f"{kind}.delta", **spot, "delta": part["text"], **logprobs}
        yield {"type": f"{kind}.done", **spot, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **spot, "part": part}
    if not content:
        name = "function_call_arguments" if field == "arguments" else "custom_tool_call_input"
        named = {"name": item["name"]} if field == "arguments" else {}
        yield {"type": f"response.{name}.delta", **within, "delta": item[field]}
        yield {"type": f"response.{name}.done", **within, **named, field: item[field]}
    yield {"type": "response.output_item.done", **at, "item": item}


DIALECT = Dialect(path="/responses", read=read, whole=whole, events=events, error=error)
