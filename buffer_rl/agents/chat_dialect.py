"""OpenAI's chat completions for a session: what a request asks, and the bodies of its answer. Pure data."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from buffer_rl.agents.messages import Message
from buffer_rl.agents.session import Exchange
from buffer_rl.errors import DataError

_log = logging.getLogger(__name__)
MODEL = "policy"
"""The name of the model that is trained; a client may use any."""
_OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Sampling is the run's: other values of the client are ignored."""
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
MOST_ANSWERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request. max_tokens: None for the run's own limit. num_answers: siblings, each a turn of its own."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    num_answers: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False


def read_request(body: Any) -> ChatRequest:
    """The request that ``body`` is. Raises DataError for what is none, and for what would change what is trained."""
    if not isinstance(body, dict):
        raise DataError("the body must be a JSON object")
    for name, neutral in _NEUTRAL.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise DataError(
                f"{name!r} would change the distribution that is trained, got {body[name]!r:.80}",
                expected=f"no {name}",
            )
    return ChatRequest(
        messages=_listed(body, "messages"),
        tools=_listed(body, "tools") if body.get("tool_choice") != "none" else [],
        max_tokens=_count(body, "max_completion_tokens", _count(body, "max_tokens", None)),
        stop=_stops(body.get("stop")),
        num_answers=_count(body, "n", 1) or 1,
        stream=bool(body.get("stream")),
        usage_in_stream=_includes_usage(body.get("stream_options")),
        logprobs=bool(body.get("logprobs")),
    )


def ignored(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The client's sampling values that are not the run's ``params``."""
    return {name: body[name] for name in _OF_THE_RUN if body.get(name) is not None and body[name] != params.get(name)}


def completion(exchanges: Sequence[Exchange], request: ChatRequest, tokenizer: Any) -> dict[str, Any]:
    """The whole answer."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": None, **_message(each), "refusal": None},
            "finish_reason": _reason(each),
            "logprobs": _logprobs(each, tokenizer) if request.logprobs else None,
        }
        for index, each in enumerate(exchanges)
    ]
    return {**_head(exchanges, "chat.completion"), "choices": choices, "usage": _usage(exchanges)}


def events(exchanges: Sequence[Exchange], request: ChatRequest, tokenizer: Any) -> list[dict[str, Any]]:
    """The whole answer as the events of a stream."""
    head, found = _head(exchanges, "chat.completion.chunk"), []
    for index, each in enumerate(exchanges):
        delta = {"role": "assistant", **_message(each)}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        logprobs = _logprobs(each, tokenizer) if request.logprobs else None
        first = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": _reason(each)}
        found += [{**head, "choices": [first]}, {**head, "choices": [last]}]
    if request.usage_in_stream:
        found.append({**head, "choices": [], "usage": _usage(exchanges)})
    return found


def error_body(what: str, code: str, *, kind: str = "invalid_request_error") -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": what, "type": kind, "param": None, "code": code}}


def models() -> dict[str, Any]:
    """``/models``."""
    return {"object": "list", "data": [model()]}


def model() -> dict[str, Any]:
    """``/models/NAME``."""
    return {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "buffer_rl"}


def _message(exchange: Exchange) -> Message:
    assert exchange.answer is not None
    return exchange.answer.message


def _reason(exchange: Exchange) -> str:
    assert exchange.answer is not None
    return exchange.answer.finish_reason


def _head(exchanges: Sequence[Exchange], kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{exchanges[0].id}", "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(exchanges: Sequence[Exchange]) -> dict[str, int]:
    prompt, output = len(exchanges[0].turn.prompt_ids), sum(len(each.turn.output_ids) for each in exchanges)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _logprobs(exchange: Exchange, tokenizer: Any) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        text = str(tokenizer.decode([token]))
        return {"token": text, "bytes": list(text.encode()), "logprob": value, "top_logprobs": []}

    turn = exchange.turn
    content = [entry(token, value) for token, value in zip(turn.output_ids, turn.log_probs, strict=True)]
    return {"content": content, "refusal": None}


def _listed(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise DataError(f"{name!r} must be a list of objects, got {value!r:.80}")
    return value


def _count(body: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1 or (name == "n" and value > MOST_ANSWERS):
        raise DataError(f"{name!r} must be a whole number above 0, got {value!r:.80}")
    return value


def _includes_usage(options: Any) -> bool:
    if not isinstance(options, dict | None):
        raise DataError(f"'stream_options' must be an object, got {options!r:.80}")
    return bool((options or {}).get("include_usage"))


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise DataError(f"'stop' must be a text or a list of texts, got {value!r:.80}")
    return stops
