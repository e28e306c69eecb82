"""Anthropic's Messages for a session: what a request asks, and the bodies of its answer. Pure data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from buffer_rl.agents import dialect
from buffer_rl.agents.dialect import Dialect, Event, Refusal, Request
from buffer_rl.agents.messages import Message, reasoning_of
from buffer_rl.agents.session import Exchange
from buffer_rl.errors import DataError

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
_TEXT = ("text",)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"tool_choice": ("auto", "none"), "output_format": ({"type": "text"},)}


def read(body: dict[str, Any], exchanges: Sequence[Exchange] = ()) -> Request:
    """See ``Dialect``. The protocol's other fields have no influence."""
    choice = body.get("tool_choice") or {}
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    formats = [body.get("output_format"), _object(body, "output_config").get("format")]
    dialect.require_neutral({"tool_choice": kind, "output_format": next(filter(None, formats), None)}, _NEUTRAL)
    messages: list[Message] = []
    if system := dialect.text_of_parts(body.get("system"), _TEXT, "system"):
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(dialect.listed(body, "messages")):
        messages += _as_chat(message, f"message {number}")
    if messages and messages[-1]["role"] == "assistant":
        raise DataError("the last message is an answer, and the model begins its answers itself", expected="a user's")
    tools, others = [], []
    for tool in dialect.listed(body, "tools") if kind != "none" else []:
        if isinstance(tool.get("input_schema"), Mapping):
            tools.append(dialect.function_tool(tool.get("name"), tool.get("description"), tool["input_schema"]))
        else:
            others.append(f"tool of type {tool.get('type')!r}")
    return Request(
        messages=messages,
        tools=tools,
        max_tokens=dialect.count(body, "max_tokens"),
        stop=dialect.stops(body, "stop_sequences"),
        body=body,
        left_out=tuple(others),
    )


def whole(exchanges: Sequence[Exchange], request: Request, tokenizer: Any) -> dict[str, Any]:
    """See ``Dialect``."""
    (exchange,) = exchanges
    usage = {"input_tokens": len(exchange.turn.prompt_ids), "output_tokens": len(exchange.turn.output_ids)}
    return {
        "id": f"msg_{exchange.id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(exchange, request),
        **_ending(exchange, request),
        "usage": usage | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }


def events(exchanges: Sequence[Exchange], request: Request, tokenizer: Any) -> list[Event]:
    """See ``Dialect``."""
    message = whole(exchanges, request, tokenizer)
    usage, ending = message["usage"], {name: message[name] for name in ("stop_reason", "stop_sequence")}
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**usage, "output_tokens": 0}
    found: list[Event] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        empty, deltas = _in_pieces(block)
        found.append({"type": "content_block_start", "index": index, "content_block": empty})
        found += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        found.append({"type": "content_block_stop", "index": index})
    return [*found, {"type": "message_delta", "delta": ending, "usage": usage}, {"type": "message_stop"}]


def error(refusal: Refusal) -> dict[str, Any]:
    """See ``Dialect``."""
    kind = _ERRORS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    what = refusal.what
    if refusal.limit:
        what = f"prompt is too long: {refusal.num_tokens} tokens > {refusal.limit} maximum"
    return {"type": "error", "error": {"type": kind, "message": what}}


def _as_chat(message: Mapping[str, Any], where: str) -> list[Message]:
    """A message in OpenAI's chat form: several if it has results of tools."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise DataError(f"its role is {role!r:.80}", where=where, expected="user or assistant")
    if not isinstance(content, list) or role == "system":
        return [{"role": role, "content": dialect.text_of_parts(content, _TEXT, where)}]
    return _answer(content, where) if role == "assistant" else _told(content, where)


def _told(blocks: Sequence[Any], where: str) -> list[Message]:
    """What a user's blocks say, in their order; texts that follow each other are one message."""
    found: list[Message] = []
    for is_result, group in groupby(blocks, _is_result):
        same = list(group)
        if not is_result:
            found.append({"role": "user", "content": dialect.text_of_parts(same, _TEXT, where)})
        for block in same if is_result else ():
            text = dialect.text_of_parts(block.get("content"), _TEXT, where)
            if block.get("is_error") and "error" not in text.lower():
                text = f"error: {text}"
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
    return found or [{"role": "user", "content": ""}]


def _is_result(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "tool_result"


def _answer(blocks: Sequence[Any], where: str) -> list[Message]:
    texts: list[Any] = []
    reasoning, calls = "", []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "thinking":
            reasoning += str(block.get("thinking") or "")
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(block)
    message: Message = {"role": "assistant", "content": dialect.text_of_parts(texts, _TEXT, where) or None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return [message]


def _blocks(exchange: Exchange, request: Request) -> list[dict[str, Any]]:
    """The content of an answer: its reasoning only if the client asked for it."""
    message, blocks = exchange.reply.message, []
    thinking = _object(request.body, "thinking")
    wants = thinking.get("type") in ("enabled", "adaptive") and thinking.get("display") != "omitted"
    if wants and (reasoning := reasoning_of(message)):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": exchange.id})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


def _in_pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as a stream begins it, and what it adds."""
    if block["type"] == "thinking":
        signature = {"type": "signature_delta", "signature": block["signature"]}
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}, signature]
        return {**block, "thinking": "", "signature": ""}, deltas
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    given = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": given}]


def _ending(exchange: Exchange, request: Request) -> dict[str, Any]:
    reason, matched = exchange.reply.finish_reason, exchange.turn.matched
    if reason == "stop" and matched in request.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    return value if isinstance(value, Mapping) else {}


DIALECT = Dialect(
    path="/messages",
    read=read,
    whole=whole,
    events=events,
    error=error,
    keep_alive=b'event: ping\ndata: {"type": "ping"}\n\n',
)
