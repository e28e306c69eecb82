"""OpenAI's chat completions for a session: what a request asks, and the bodies of its answer. Pure data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from buffer_rl.agents import dialect
from buffer_rl.agents.dialect import Dialect, Event, Refusal, Request
from buffer_rl.agents.session import Exchange
from buffer_rl.engines.openai import token_entry
from buffer_rl.errors import DataError

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "logit_bias": ({},),
    "functions": ([],),
}
"""What would change the distribution that is trained, with the values that change nothing."""


def read(body: dict[str, Any], exchanges: Sequence[Exchange] = ()) -> Request:
    """See ``Dialect``."""
    dialect.require_neutral(body, _NEUTRAL)
    if not isinstance(options := body.get("stream_options"), dict | None):
        raise DataError(f"'stream_options' must be an object, got {options!r:.80}")
    return Request(
        messages=dialect.listed(body, "messages"),
        tools=dialect.listed(body, "tools") if body.get("tool_choice") != "none" else [],
        max_tokens=dialect.count(body, "max_completion_tokens", dialect.count(body, "max_tokens")),
        stop=dialect.stops(body, "stop"),
        num_answers=dialect.count(body, "n", most=dialect.MOST_ANSWERS) or 1,
        body=body,
    )


def whole(exchanges: Sequence[Exchange], request: Request, tokenizer: Any) -> dict[str, Any]:
    """See ``Dialect``."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": None, **each.reply.message, "refusal": None},
            "finish_reason": each.reply.finish_reason,
            "logprobs": _logprobs(each, request, tokenizer),
        }
        for index, each in enumerate(exchanges)
    ]
    return {**_head(exchanges, "chat.completion"), "choices": choices, "usage": _usage(exchanges)}


def events(exchanges: Sequence[Exchange], request: Request, tokenizer: Any) -> list[Event]:
    """See ``Dialect``."""
    head: Event = _head(exchanges, "chat.completion.chunk")
    found: list[Event] = []
    for index, each in enumerate(exchanges):
        delta = {"role": "assistant", **each.reply.message}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        logprobs = _logprobs(each, request, tokenizer)
        first = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": each.reply.finish_reason}
        found += [{**head, "choices": [first]}, {**head, "choices": [last]}]
    if (request.body.get("stream_options") or {}).get("include_usage"):
        found.append({**head, "choices": [], "usage": _usage(exchanges)})
    return found


def error(refusal: Refusal) -> dict[str, Any]:
    """See ``Dialect``."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {"error": {"message": refusal.what, "type": kind, "param": None, "code": refusal.code}}


def _head(exchanges: Sequence[Exchange], kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{exchanges[0].id}", "object": kind, "created": int(time.time()), "model": dialect.MODEL}


def _usage(exchanges: Sequence[Exchange]) -> dict[str, int]:
    prompt, output = len(exchanges[0].turn.prompt_ids), sum(len(each.turn.output_ids) for each in exchanges)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _logprobs(exchange: Exchange, request: Request, tokenizer: Any) -> dict[str, Any] | None:
    """Of the sampled tokens, if the client wants them."""
    if not request.body.get("logprobs"):
        return None

    turn = exchange.turn
    texts = [str(tokenizer.decode([token])) for token in turn.output_ids]
    entries = [token_entry(text, value) for text, value in zip(texts, turn.log_probs, strict=True)]
    return {"content": [{**entry, "top_logprobs": []} for entry in entries], "refusal": None}


DIALECT = Dialect(
    path="/chat/completions", read=read, whole=whole, events=events, error=error, done=b"data: [DONE]\n\n"
)
