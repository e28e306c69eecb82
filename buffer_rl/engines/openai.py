"""OpenAI's chat and text completions: requests to SGLang's ``/generate``, and answers back. Pure translation.

What training needs comes back under SGLang's names. ``return_token_ids: true`` adds the token ids of the prompt and of
the output to each choice (``prompt_token_ids`` and, in a chat, ``response_token_ids``, else ``token_ids``).
``return_meta_info: true`` adds ``meta_info`` of ``/generate`` with the weight versions of the tokens. ``logprobs``
adds their log-probabilities. ``input_ids`` in a chat takes the place of the template, so that a conversation goes on
behind the very tokens that were sampled.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from buffer_rl.data.json_text import JSONError, read_json
from buffer_rl.engines.protocol import CONTEXT_LENGTH_EXCEEDED, BadRequestError, is_neutral
from buffer_rl.errors import raised_as

# Fields that would change the answer and are not implemented, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    **dict.fromkeys(
        ("logit_bias", "suffix", "json_schema", "regex", "ebnf", "stop_regex", "custom_logit_processor"), ()
    ),
}
# Sampling parameters that keep their name.
_SAMPLING = (
    *("n", "stop", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "no_stop_trim", "ignore_eos"),
    "skip_special_tokens",
)
DEFAULT_MAX_TOKENS = 16  # of a text completion, as OpenAI's


@dataclass(slots=True, kw_only=True)
class Reply:
    """What the answer of one request looks like. decode: text of token ids. echo: the prompts' texts stand before their
    answers. top: the likeliest tokens to report of each position; -1 for no log-probabilities at all."""

    chat: bool
    model: str
    decode: Callable[[Sequence[int]], str]
    top: int = -1
    stream: bool = False
    usage_in_stream: bool = False
    token_ids: bool = False
    meta_info: bool = False
    echo: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))


def error_body(message: str, status: int = 400, code: str | None = None) -> dict[str, Any]:
    """An error as SGLang words it, which OpenAI's clients read. code: OpenAI's name of what is wrong."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code or status}


def model_list(name: str, context_length: int) -> dict[str, Any]:
    """``/v1/models``."""
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "buffer_rl", "root": name}
    return {"object": "list", "data": [{**card, "parent": None, "max_model_len": context_length}]}


# ---------------------------------------------------------------------- requests


def read_chat(body: Any, tokenizer: Any, context_length: int, model: str) -> tuple[dict[str, Any], Reply]:
    """The body of ``/generate`` for a chat. Raises BadRequestError."""
    reply = _read(body, tokenizer, model, chat=True)
    messages, ids = body.get("messages"), body.get("input_ids")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRequestError("'messages' must be a list of objects")
    if ids is None:
        ids = _templated(messages, body, tokenizer)
    elif not isinstance(ids, list):
        raise BadRequestError("'input_ids' must be a list of token ids")
    limit = body.get("max_tokens") if (own := body.get("max_completion_tokens")) is None else own
    if len(ids) >= context_length:
        most = f"expected fewer than the model's context length of {context_length}"
        raise BadRequestError(f"the messages have {len(ids)} tokens; {most}", code=CONTEXT_LENGTH_EXCEEDED)
    params = _params(body, context_length - len(ids) if limit is None else limit)
    if body.get("logprobs"):
        reply.top = _count(body, "top_logprobs", 0)
    return _generate(body, {"input_ids": ids}, params, reply), reply


def read_completion(body: Any, tokenizer: Any, model: str) -> tuple[dict[str, Any], Reply]:
    """The body of ``/generate`` for a text completion. Raises BadRequestError."""
    reply = _read(body, tokenizer, model, chat=False)
    prompt = body.get("prompt")
    if not isinstance(prompt, str | list) or not prompt:
        raise BadRequestError("'prompt' must be a text, token ids, or a list of either")
    is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
    limit = _count(body, "max_tokens", DEFAULT_MAX_TOKENS)
    if not limit and not body.get("echo"):
        raise BadRequestError("max_tokens must be positive")
    reply.top = _count(body, "logprobs", -1)
    reply.echo = bool(body.get("echo"))
    if reply.echo and reply.stream:
        raise BadRequestError("'echo' is not supported in a stream")
    params = _params(body, limit)
    generate = _generate(body, {"text" if is_text else "input_ids": prompt}, params, reply)
    if reply.echo and reply.top >= 0:
        generate["logprob_start_len"] = 0
    return generate, reply


def _read(body: Any, tokenizer: Any, model: str, *, chat: bool) -> Reply:
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    if tokenizer is None:
        raise BadRequestError("this endpoint needs a tokenizer, and the model's folder has none")
    for name, neutral in _NEUTRAL.items():
        if not is_neutral(body.get(name), neutral):
            raise BadRequestError(f"{name!r} is not supported, got {body[name]!r:.80}")
    return Reply(
        chat=chat,
        model=str(body.get("model") or model),
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        stream=bool(body.get("stream")),
        usage_in_stream=bool(_object(body, "stream_options").get("include_usage")),
        token_ids=bool(body.get("return_token_ids") or body.get("return_prompt_token_ids")),
        meta_info=bool(body.get("return_meta_info")),
    )


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise BadRequestError(f"{name!r} must be an object, got {value!r}")
    return value or {}


def _count(body: dict[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise BadRequestError(f"{name!r} must be a whole number, got {value!r}")
    return default if value is None else int(value)


def _params(body: dict[str, Any], max_new_tokens: Any) -> dict[str, Any]:
    names = {**{name: name for name in _SAMPLING}, "sampling_seed": "seed", "min_new_tokens": "min_tokens"}
    params = {ours: body[name] for ours, name in names.items() if body.get(name) is not None}
    return {**params, "max_new_tokens": max_new_tokens}


def _generate(body: dict[str, Any], prompt: dict[str, Any], params: dict[str, Any], reply: Reply) -> dict[str, Any]:
    if body.get("rid") is not None:
        reply.id = str(body["rid"])
    wanted = {"return_logprob": reply.top >= 0 or reply.meta_info, "top_logprobs_num": max(reply.top, 0)}
    return {**prompt, **wanted, "rid": reply.id, "sampling_params": params}


def _templated(messages: list[dict[str, Any]], body: dict[str, Any], tokenizer: Any) -> list[int]:
    """Token ids of a conversation, by the chat template of the tokenizer."""
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    going_on = bool(body.get("continue_final_message"))
    variables = _object(body, "chat_template_kwargs")
    if body.get("chat_template") is not None or "chat_template" in variables:
        raise BadRequestError("'chat_template' is not supported: the template is that of the model's folder")
    # Fault boundary: a template is a program of the model's folder.
    with raised_as(BadRequestError, "the chat template", Exception):
        text = tokenizer.apply_chat_template(
            [_message(message) for message in messages],
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=not going_on,
            continue_final_message=going_on,
            **variables,
        )
    return list(tokenizer.encode(text, add_special_tokens=False))


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: its content a text, the arguments of its tool calls objects."""
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise BadRequestError("only parts of type 'text' are supported in a message")
        message["content"] = " ".join(str(part.get("text")) for part in content)
    elif content is None:
        message["content"] = ""
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return message


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRequestError("'tool_calls' must be a list of objects with a 'function'")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with raised_as(BadRequestError, "the arguments of a tool call are not JSON", JSONError):
            arguments = read_json(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments} if "arguments" in function else function}


# ---------------------------------------------------------------------- answers


def response(rows: list[dict[str, Any]], prompts: list[Sequence[int]], n: int, reply: Reply) -> dict[str, Any]:
    """The whole answer. rows: those of ``/generate``; prompts: the token ids of each row's prompt, ``n`` rows each."""
    choices = []
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        text = (reply.decode(prompt) if reply.echo else "") + row["text"]
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if reply.chat else {"text": text}
        meta = row["meta_info"]
        choice = {"index": index, **content, "logprobs": log_probs(meta, reply), **_ending(meta)}
        if reply.token_ids:
            choice |= {"prompt_token_ids": prompt, _ids_name(reply): row["output_ids"]}
        if reply.meta_info:
            choice["meta_info"] = meta
        choices.append(choice)
    kind = "chat.completion" if reply.chat else "text_completion"
    metadata = {name: rows[0]["meta_info"][name] for name in ("weight_version", "weight_versions")}
    if reply.chat:  # whose metadata are texts; OpenAI's text completions have none
        metadata["weight_versions"] = orjson.dumps(metadata["weight_versions"]).decode()
    return {**_head(reply, kind), "choices": choices, "usage": usage(rows, n), "metadata": metadata}


def chunk(index: int, text: str, ids: list[int], meta: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """A chunk of a stream with new tokens. meta: ``meta_info`` with the log-probabilities of these alone."""
    own = {_ids_name(reply): ids} if reply.token_ids else {}
    return _chunk(index, text, {"content": text}, reply, logprobs=log_probs(meta, reply), **own)


def opening(index: int, prompt: Sequence[int], reply: Reply) -> dict[str, Any]:
    """The first chunk of a choice."""
    own = {"prompt_token_ids": prompt} if reply.token_ids else {}
    return _chunk(index, "", {"role": "assistant", "content": ""}, reply, **own)


def closing(index: int, meta: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """The last chunk of a choice. meta: the whole ``meta_info``."""
    own = {"meta_info": meta} if reply.meta_info else {}
    return _chunk(index, "", {}, reply, **_ending(meta), **own)


def _chunk(index: int, text: str, delta: dict[str, str], reply: Reply, **own: Any) -> dict[str, Any]:
    new = {"delta": delta} if reply.chat else {"text": text}
    empty = {"logprobs": None, "finish_reason": None, "matched_stop": None}
    return chunk_of([{"index": index, **new, **empty, **own}], reply)


def chunk_of(choices: list[dict[str, Any]], reply: Reply, **more: Any) -> dict[str, Any]:
    """One event of a stream."""
    kind = "chat.completion.chunk" if reply.chat else "text_completion"
    return {**_head(reply, kind), "choices": choices, **more}


def usage(rows: list[dict[str, Any]], n: int) -> dict[str, Any]:
    """Token counts; a prompt counts once for its ``n`` rows."""
    prompt = sum(row["meta_info"].get("prompt_tokens", 0) for row in rows[::n])
    output = sum(row["meta_info"]["completion_tokens"] for row in rows)
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}


def _ids_name(reply: Reply) -> str:
    return "response_token_ids" if reply.chat else "token_ids"


def _ending(meta: dict[str, Any]) -> dict[str, Any]:
    reason = meta["finish_reason"]
    return {"finish_reason": reason["type"], "matched_stop": reason.get("matched")}


def log_probs(meta: dict[str, Any], reply: Reply) -> dict[str, Any] | None:
    """``logprobs`` of a choice, from lists of ``[log-probability, token id, null]``."""
    if reply.top < 0:
        return None
    entries = [*(meta["input_token_logprobs"] if reply.echo else []), *meta["output_token_logprobs"]]
    input_top = meta.get("input_top_logprobs", []) if reply.echo else []
    tops = [*input_top, *meta.get("output_top_logprobs", [])] or [[]] * len(entries)
    tokens = [reply.decode([token]) for _, token, _ in entries]
    likeliest = [[(reply.decode([token]), value) for value, token, _ in top or []] for top in tops]
    values = [value for value, _, _ in entries]
    if reply.chat:
        content = [
            {**token_entry(token, value), "top_logprobs": [token_entry(*pair) for pair in top]}
            for token, value, top in zip(tokens, values, likeliest, strict=True)
        ]
        return {"content": content}
    named = [dict(top) if top else None for top in likeliest]
    return {"text_offset": [-1] * len(tokens), "token_logprobs": values, "tokens": tokens, "top_logprobs": named}


def token_entry(text: str, value: float) -> dict[str, Any]:
    """A token of a chat's ``logprobs``."""
    return {"token": text, "bytes": list(text.encode()), "logprob": value}
