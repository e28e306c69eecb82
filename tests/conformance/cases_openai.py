"""Cases of OpenAI's endpoints."""

from __future__ import annotations

from typing import Any

from conformance.cases_generate import P, Q
from conformance.reference import Reference
from conformance.steps import Case, ask, get

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}


def cases(ref: Reference) -> list[Case]:
    """All of them."""
    models = Case(name="models", steps=[get("/v1/models")], expect=[{"status": 200, "models": 1}], topic="/v1/models")
    return [models, *_texts(ref), *_chats(ref)]


def _text(name: str, expect: dict[str, Any], *, why: str = "", real: Any = None, **body: Any) -> Case:
    body = {"model": "m", **GREEDY, **body}
    return Case(name=name, steps=[ask(TEXT, body)], expect=[expect], topic=TEXT, why=why, as_sglang=real and [real])


def _texts(ref: Reference) -> list[Case]:
    ids, other = ref.greedy(P, 6), ref.greedy(Q, 6)
    text, prompt = ref.decode(ids), ref.decode(P)
    pairs = [[ref.decode([token]), value] for token, value in zip(ids, ref.log_probs(P, ids), strict=True)]
    usage = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    whole = {"finish": "length", "text": text}
    stop = {"finish": "stop", "matched": text[3], "text": text[: text.index(text[3])]}
    span = {"version": "0", "start": 0, "end": 6}
    heard = [[ref.decode([token]), value] for token, value in zip(P, [None, *ref.log_probs(P[:1], P[1:])], strict=True)]
    return [
        _text("the prompt again", {"rows": [{"text": prompt + text}]}, prompt=prompt, echo=True),
        _text(
            "log-probabilities of the prompt",
            {"rows": [{"logprobs": [*heard, *pairs]}]},
            prompt=prompt,
            echo=True,
            logprobs=1,
        ),
        _text("a text", {"status": 200, "rows": [whole], "usage": usage}, prompt=prompt),
        _text("token ids", {"rows": [whole], "usage": usage}, prompt=list(P)),
        _text("two texts", {"rows": [whole, {"text": ref.decode(other)}]}, prompt=[prompt, ref.decode(Q)]),
        _text("two lists of token ids", {"rows": [whole, {"text": ref.decode(other)}]}, prompt=[list(P), list(Q)]),
        _text(
            "two samples",
            {"rows": [whole, whole], "usage": {**usage, "completion_tokens": 12, "total_tokens": 16}},
            prompt=prompt,
            n=2,
        ),
        _text("a stop string", {"rows": [stop]}, prompt=prompt, stop=text[3]),
        _text("a list of stop strings", {"rows": [stop]}, prompt=prompt, stop=["\t", text[3]]),
        _text("log-probabilities", {"rows": [{**whole, "logprobs": pairs}]}, prompt=prompt, logprobs=1),
        _text("token ids back", {"rows": [{"ids": ids, "prompt_ids": list(P)}]}, prompt=prompt, return_token_ids=True),
        _text(
            "the version of the weights",
            {"metadata": {"weight_version": "0", "weight_versions": [span]}},
            prompt=prompt,
        ),
        _text("a stream", {"stream": True, "rows": [{**whole, "chunks": "several"}]}, prompt=prompt, stream=True),
        _text(
            "a stream with usage",
            {"stream": True, "rows": [whole], "usage": usage},
            prompt=prompt,
            stream=True,
            stream_options={"include_usage": True},
        ),
        _text(
            "log-probabilities in a stream",
            {"rows": [{**whole, "logprobs": pairs}]},
            prompt=prompt,
            stream=True,
            logprobs=1,
        ),
        _text("token ids in a stream", {"rows": [{"ids": ids}]}, prompt=prompt, stream=True, return_token_ids=True),
        _text(
            "a stop string in a stream", {"rows": [{"text": stop["text"]}]}, prompt=prompt, stop=text[3], stream=True
        ),
        _text("a seed", {"status": 200}, prompt=prompt, seed=3),
        _text("no token", {"status": 400}, prompt=prompt, max_tokens=0),
        _text("an empty list of prompts", {"status": 400}, prompt=[]),
        _text("a temperature below 0", {"status": 400}, prompt=prompt, temperature=-1),
    ]


def _chat(
    name: str, expect: dict[str, Any], content: Any = "ab", *, why: str = "", real: Any = None, **body: Any
) -> Case:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **GREEDY, **body}
    return Case(name=name, steps=[ask(CHAT, body)], expect=[expect], topic=CHAT, why=why, as_sglang=real and [real])


def _chats(ref: Reference) -> list[Case]:
    prompt = ref.encode("uaba")
    ids = ref.greedy(prompt, 6)
    text = ref.decode(ids)
    whole = {"finish": "length", "text": text}
    pairs = [[ref.decode([token]), value] for token, value in zip(ids, ref.log_probs(prompt, ids), strict=True)]
    usage = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    apart = ref.decode(ref.greedy(ref.encode("ua ba"), 6))
    with_tool = ref.decode(ref.greedy(ref.encode("Tfuaba"), 6))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    talk = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "x", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "9"},
    ]
    answered = ref.decode(ref.greedy(ref.encode("uabax5t9a"), 6))
    stop = {"finish": "stop", "matched": text[3], "text": text[: text.index(text[3])]}
    return [
        _chat("a chat", {"status": 200, "rows": [whole], "usage": usage}),
        _chat(
            "parts of text",
            {"rows": [{"text": apart}], "usage": {"prompt_tokens": 5}},
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        ),
        _chat("max_completion_tokens", {"rows": [{"text": text[:3]}]}, max_tokens=None, max_completion_tokens=3),
        _chat("two samples", {"rows": [whole, whole]}, n=2),
        _chat("a stop string", {"rows": [stop]}, stop=text[3]),
        _chat("tools in the template", {"rows": [{"text": with_tool}]}, tools=[tool]),
        _chat("no tools where none is to be called", {"rows": [whole]}, tools=[tool], tool_choice="none"),
        _chat("calls of tools, and their answers", {"rows": [{"text": answered}]}, messages=talk),
        _chat("token ids in place of the template", {"rows": [whole]}, "xyz", input_ids=prompt),
        _chat("log-probabilities", {"rows": [{**whole, "logprobs": pairs}]}, logprobs=True),
        _chat("likeliest tokens", {"rows": [{**whole, "logprobs": pairs}]}, logprobs=True, top_logprobs=2),
        _chat("token ids back", {"rows": [{"ids": ids, "prompt_ids": prompt}]}, return_token_ids=True),
        _chat("weight versions back", {"rows": [{"spans": [["0", 0, 6]]}]}, return_meta_info=True),
        _chat("a stream", {"stream": True, "rows": [{**whole, "chunks": "several"}]}, stream=True),
        _chat("log-probabilities in a stream", {"rows": [{**whole, "logprobs": pairs}]}, stream=True, logprobs=True),
        _chat(
            "a stream with usage",
            {"rows": [whole], "usage": usage},
            stream=True,
            stream_options={"include_usage": True},
        ),
        _chat("two samples in a stream", {"rows": [whole, whole]}, stream=True, n=2),
        _chat(
            "token ids in a stream",
            {"rows": [{**whole, "ids": ids}]},
            real={"status": lambda status: status in (200, 400)},
            why="absent",
            stream=True,
            return_token_ids=True,
        ),
        _chat("no messages", {"status": 400}, messages=None),
        _chat("a temperature below 0", {"status": 400}, temperature=-1),
    ]
