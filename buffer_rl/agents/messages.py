"""Messages of OpenAI's chat protocol: the answer that a text is, and when two messages are equal.

An answer is read in the forms that most open models write: ``<think>`` for reasoning, and ``<tool_call>`` around JSON,
around ``<function=NAME>`` with ``<parameter=KEY>``, or around a name with ``<arg_key>`` and ``<arg_value>``. Calls are
read one by one: what is no call, such as a malformed or an unfinished one, stays in the text. Nothing is lost.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""``{"role": ..., "content": ..., ...}``, as OpenAI's protocol has it."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"([^\s<{]+)\s*((?:<arg_key>.*</arg_value>)?)", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>", re.DOTALL)
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
_END = re.compile(r"\s*</tool_call>")
_JSON = json.JSONDecoder(strict=False)  # models write line breaks into strings


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client gets: the assistant's message, and OpenAI's finish reason: stop, tool_calls or length."""

    message: Message
    finish_reason: str


AnswerReader = Callable[[str, str, Sequence[Mapping[str, Any]], str, str], Answer]
"""``read_answer``, or a function of a plugin's own for a model that writes other forms."""


def read_answer(
    text: str, prompt: str, tools: Sequence[Mapping[str, Any]], finish_reason: str, identity: str
) -> Answer:
    """The message that a sampled text is.

    text: without the token or the string that ended it. prompt: the text before it, whose end may begin its reasoning,
    as ``"<think>\\n"``, or begin and end it. tools: of the request, in OpenAI's form; without any, nothing is read as
    a call. finish_reason: of the engine. identity: of the turn; the ids of calls are a digest of it.

    The message has ``content`` (None if there is no text), ``reasoning_content`` if there is any, and ``tool_calls``
    if there are any: every well-formed one in order, also of a tool that the request does not have.
    """
    reasoning, content = split_reasoning(opened_reasoning(prompt) + text)
    calls: list[Message] = []
    if tools:
        schemas = {str(_function(tool).get("name")): _properties(tool) for tool in tools}
        content, calls = _take_calls(content, schemas)
    return answer_with(content, reasoning, calls, finish_reason, identity)


def answer_with(content: str, reasoning: str, calls: Sequence[Message], finish_reason: str, identity: str) -> Answer:
    """The answer of these parts. calls: name and arguments of each; the rest as ``read_answer`` has it."""
    message: Message = {"role": "assistant", "content": content or None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_as_message(call, f"{identity}/{number}") for number, call in enumerate(calls)]
    reason = "length" if finish_reason != "stop" else "tool_calls" if calls else "stop"
    return Answer(message=message, finish_reason=reason)


def opened_reasoning(prompt: str) -> str:
    """The reasoning that the end of a prompt has begun, as ``"<think>\\n"``, or begun and ended; empty if none."""
    return found[0] if (found := _OPENED.search(prompt)) else ""


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and content of a text that may begin with ``<think>``; all is reasoning if it does not end."""
    if not text.lstrip().startswith("<think>"):
        return "", text
    reasoning, end, content = text.lstrip().removeprefix("<think>").partition("</think>")
    return reasoning.strip("\n"), content.lstrip("\n") if end else ""


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message: its content, or the parts of it, a line each; parts that are no text as JSON."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    return "\n".join(map(_text_of_part, parts))


def message_key(message: Mapping[str, Any]) -> str:
    """Equal for messages of equal role, text and calls (name and parsed arguments). The ids of calls, the spelling of
    arguments (order of keys, spaces, ``1`` and ``1.0``, ``""`` and ``{}``) and reasoning have no influence."""
    calls = [[call["name"], call["arguments"]] for _, call in calls_of(message)]
    return _canonical([message.get("role"), text_of(message), calls])


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning of a message without the spaces around it; empty if there is none."""
    return next((str(message[name]).strip() for name in ("reasoning_content", "reasoning") if message.get(name)), "")


def same_reasoning(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether a client's message has the recorded reasoning, or none: most clients drop it."""
    return reasoning_of(given) in ("", reasoning_of(recorded))


def calls_of(message: Mapping[str, Any]) -> list[tuple[Any, Message]]:
    """Id, and ``{"name": ..., "arguments": ...}``, of each call of a message; arguments are an object if they can be
    read as one, else what the client sent."""
    calls = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        function = _function(call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _object_or_text(arguments)
        name = {"name": function.get("name"), "arguments": {} if arguments is None else arguments}
        found.append((call.get("id") if isinstance(call, Mapping) else None, name))
    return found


def _take_calls(content: str, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[Message]]:
    """The text without its well-formed calls, and these. Spaces around a call belong to the form, not to the text."""
    first, *others = content.split(_OPEN)
    rest, calls = first, []
    for body in others:  # none has the mark that opens the next call, so that a text without ends takes linear time
        call, end = _read_call(body, schemas)
        if call is None:
            rest += _OPEN + body
        else:
            calls.append(call)
            rest = "\n".join(filter(None, (rest.rstrip(), body[end:].strip())))
    return rest, calls


def _read_call(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[Message | None, int]:
    """The call that ``body``, which follows the mark that opens it, begins with, and where it ends; None for none."""
    if body.lstrip().startswith("{"):
        name, arguments, end = _json_call(body, len(body) - len(body.lstrip()))
    else:
        end = max(body.find(_CLOSE), 0)
        name, arguments = _tagged_call(body[:end].strip(), schemas)
    close = _END.match(body, end)
    if close is None or not (isinstance(name, str) and name and isinstance(arguments, dict)):
        return None, 0
    return {"name": name, "arguments": arguments}, close.end()


def _json_call(body: str, start: int) -> tuple[Any, Any, int]:
    try:
        _, end = _JSON.raw_decode(body, start)
    except (ValueError, RecursionError):
        return None, None, 0
    call = _parsed(body[start:end]) or {}
    arguments = call.get("arguments", call.get("parameters", {}))
    return call.get("name"), _parsed(arguments) if isinstance(arguments, str) else arguments, end


def _tagged_call(block: str, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[Any, Any]:
    if found := _FUNCTION.fullmatch(block):
        name = found[1].strip()
        return name, _typed(found[2], _PARAMETER, schemas.get(name, {}))
    if found := _NAMED.fullmatch(block):
        return found[1], _typed(found[2], _ARGUMENT, schemas.get(found[1], {}))
    return None, None


def _typed(text: str, pattern: re.Pattern[str], properties: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments that are written as text: each is JSON, unless the tool's schema says that it is a text or it is no
    JSON. None if there is other text between them, such as one that is cut."""
    if pattern.sub("", text).strip():
        return None
    arguments: dict[str, Any] = {}
    for key, value in pattern.findall(text):
        schema = properties.get(key.strip())
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        parsed = None if is_text else _parsed(value)
        arguments[key.strip()] = value if parsed is None and value.strip() != "null" else parsed
    return arguments


def _parsed(text: str) -> Any:
    """What JSON says; None for text that is none, that cannot be written as UTF-8 or that has numbers beyond JSON."""
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _object_or_text(text: str) -> Any:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _as_message(call: Message, identity: str) -> Message:
    # Nine letters and digits: what the strictest templates accept.
    name = hashlib.sha256(identity.encode()).hexdigest()[:9]
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _canonical(value: Any) -> str:
    return json.dumps(_whole(value), sort_keys=True, default=str)


def _whole(value: Any) -> Any:
    """The value with ``1.0`` as ``1``: clients in other languages write it so."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _whole(each) for key, each in value.items()}
    return [_whole(each) for each in value] if isinstance(value, list | tuple) else value


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = _function(tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _text_of_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    return text if isinstance(text, str) else _canonical(part)
