"""What the gateway knows of a dialect of HTTP: one value with pure functions for requests, answers, streams and errors.

A dialect reads a request as what ``Session.chat`` needs, in OpenAI's chat form, and writes recorded answers. So the
same conversation has the same turns with the same ids in every dialect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from buffer_rl.agents.messages import Message
from buffer_rl.agents.session import Exchange, SessionEndedError, TooLongError, UnknownRepeatError
from buffer_rl.errors import BufferRLError, DataError, EngineError

_log = logging.getLogger(__name__)
MODEL = "policy"
"""The name of the model that is trained; a client may use any."""
OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Sampling is the run's: other values of the client are ignored."""
MOST_ANSWERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, its messages and tools in OpenAI's chat form. max_tokens: None for the run's own limit. num_answers:
    siblings, each a turn of its own. body: what was sent. left_out: what the model is not told of, in words."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    num_answers: int = 1
    body: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def stream(self) -> bool:
        """Whether the answer is wanted as events."""
        return bool(self.body.get("stream"))

    @property
    def model(self) -> str:
        """The name that the client has for the model."""
        return str(self.body.get("model") or MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that is not answered. code: OpenAI's, or one of ours. num_tokens, limit: of a prompt that is too long,
    else 0."""

    what: str
    status: int = 400
    code: str = "invalid_request"
    num_tokens: int = 0
    limit: int = 0


Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """read: the request that a JSON object is, given the session's turns; raises DataError for what is none, and for
    what would change what is trained. whole, events: the answer, as a body and as the events of a stream; of the turns,
    the request and the tokenizer. error: the body of a refusal. keep_alive: what a stream sends while its answer is
    not there yet; done: what it ends with."""

    path: str
    read: Callable[[dict[str, Any], Sequence[Exchange]], Request]
    whole: Callable[[Sequence[Exchange], Request, Any], dict[str, Any]]
    events: Callable[[Sequence[Exchange], Request, Any], list[Event]]
    error: Callable[[Refusal], dict[str, Any]]
    keep_alive: bytes = b": keep-alive\n\n"
    done: bytes = b""


def frame(event: Event) -> bytes:
    """An event as a stream has it: named by its type, if it has one."""
    name = b"event: " + str(event["type"]).encode() + b"\n" if "type" in event else b""
    return name + b"data: " + orjson.dumps(event) + b"\n\n"


ENDED = Refusal(what="the session has ended", status=410, code="session_ended")


def innermost(error: BaseException | None) -> BaseException | None:
    """The first error of groups in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def unknown_repeat(what: str) -> Refusal:
    """The answer to a repeat that may be of any request, or of none."""
    said = f"what the repeated request was answered is unknown: {what}"
    return Refusal(what=said, status=409, code="unknown_repeat")


def refusal_of(error: BaseException | None) -> Refusal:
    """The answer to a request that failed with ``error``, or was cancelled by the end of its session."""
    error = innermost(error)
    if error is None:
        return ENDED
    if isinstance(error, UnknownRepeatError):
        return unknown_repeat(error.what)
    if isinstance(error, SessionEndedError):
        return Refusal(what=str(error), status=410, code="session_ended")
    if isinstance(error, TooLongError):
        tokens, limit = error.num_tokens, error.limit
        return Refusal(what=error.what, code="context_length_exceeded", num_tokens=tokens, limit=limit)
    if isinstance(error, BufferRLError) and not isinstance(error, EngineError):
        return Refusal(what=str(error))
    if not isinstance(error, EngineError):
        _log.error("a request of an agent failed", exc_info=error)
    return Refusal(what=f"{type(error).__name__}: {error}", status=502, code="engine_failed")


def ignored(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The client's sampling values that are not the run's ``params``."""
    return {name: body[name] for name in OF_THE_RUN if body.get(name) is not None and body[name] != params.get(name)}


def require_neutral(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises DataError for a value that would change what is sampled. neutral: by name, the values that do not."""
    for name, values in neutral.items():
        if body.get(name) is not None and body[name] not in values:
            what = f"{name!r} would change the distribution that is trained, got {body[name]!r:.80}"
            raise DataError(what, expected=f"no {name}")


def listed(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects; an empty one for none. Raises DataError for anything else."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise DataError(f"{name!r} must be a list of objects, got {value!r:.80}")
    return value


def count(body: Mapping[str, Any], name: str, default: int | None = None, most: int | None = None) -> int | None:
    """A whole number of 1 to ``most``. Raises DataError for anything else."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1 or (most is not None and value > most):
        raise DataError(f"{name!r} must be a whole number above 0, got {value!r:.80}")
    return value


def stops(body: Mapping[str, Any], name: str) -> list[str]:
    """A text or a list of texts. Raises DataError for anything else."""
    value = body.get(name)
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(stop, str) and stop for stop in found):
        raise DataError(f"{name!r} must be a text or a list of texts, got {value!r:.80}")
    return found


def text_of_parts(content: Any, types: Sequence[str], where: str) -> str:
    """The text of a content that is a text, None or a list of parts of ``types``, a line each.

    Raises DataError for a part of another type, such as an image."""
    if not isinstance(content, list):
        if not isinstance(content, str | None):
            raise DataError(f"its content is {content!r:.80}", where=where, expected="a text or a list")
        return content or ""
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in types or not isinstance(part.get("text"), str):
            raise DataError(f"a part of type {kind!r}", where=where, expected="text: the model reads nothing else")
        texts.append(part["text"])
    return "\n".join(texts)


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool in OpenAI's chat form."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
