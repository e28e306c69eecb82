"""Answers in one form for all servers: without times, random names and words, with log-probabilities judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.reference import Reference

TOLERANCE = 0.002
"""Nats between the log-probability of a server and that of transformers."""
_KEPT = (
    *("success", "weight_version", "num_paused_requests", "model_path", "is_generation", "object", "usage"),
    "metadata",
)


def normalised(status: int, body: Any, request: Any, reference: Reference) -> dict[str, Any]:
    """An answer as an object: ``status``; ``rows`` of generated output; ``message`` of an error; else what is left."""
    request = request if isinstance(request, Mapping) else {}
    if status >= 400 or (isinstance(body, Mapping) and "error" in body):
        return {"status": status, "message": _message(body)}
    if isinstance(body, Mapping) and "choices" in body:
        rows = [_choice(choice) for choice in body["choices"]]
        return {"status": status, "rows": rows, **_kept(body)}
    if isinstance(body, list) and body and body[-1] == "[DONE]":
        return {"status": status, **_streamed(body[:-1])}
    if isinstance(body, Mapping) and "meta_info" in body:
        return {"status": status, "rows": [_row(body, request, 0, reference)]}
    if isinstance(body, list) and body and isinstance(body[0], Mapping) and "meta_info" in body[0]:
        rows = [_row(row, request, i, reference) for i, row in enumerate(body)]
        return {"status": status, "list": True, "rows": rows}
    if isinstance(body, Mapping):
        models = {"models": len(body["data"])} if "data" in body else {}
        return {"status": status, **_kept(body), **models}
    return {"status": status}


def _message(body: Any) -> str:
    error = body.get("error", body.get("message", "")) if isinstance(body, Mapping) else body
    return str(error.get("message", "") if isinstance(error, Mapping) else error)


def _kept(body: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: body[key] for key in _KEPT if key in body}
    if "usage" in kept:
        kept["usage"] = {key: kept["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return kept


def finish(reason: Mapping[str, Any] | None) -> str:
    """A finish reason in a word or two."""
    if reason is None:
        return "none"
    last = reason.get("length", reason.get("matched", ""))
    return f"{reason['type']} {last}".strip()


def _row(row: Mapping[str, Any], request: Mapping[str, Any], index: int, reference: Reference) -> dict[str, Any]:
    meta, ids = row["meta_info"], row["output_ids"]
    prompt, params = _prompt(request, index, reference), request.get("sampling_params") or {}
    if isinstance(params, list):
        params = params[index]
    spans = [[span["version"], span["start"], span["end"]] for span in meta.get("weight_versions", [])]
    found = {
        "finish": finish(meta["finish_reason"]),
        "ids": ids,
        "text": row["text"],
        "spans": spans,
        "completion_tokens": meta["completion_tokens"],
        "log_probs": _judged(meta.get("output_token_logprobs"), prompt, ids, spans, params, reference),
    }
    for name in ("prompt_tokens", "num_retractions"):
        found |= {name: meta[name]} if name in meta else {}
    for name in ("input_token_logprobs", "input_top_logprobs", "output_top_logprobs"):
        found |= {name: _entries(meta[name])} if meta.get(name) else {}
    for name in ("input_token_ids_logprobs", "output_token_ids_logprobs"):
        found |= {name: _entries(meta[name])} if meta.get(name) else {}
    if isinstance(request.get("rid"), str) and meta["id"].startswith(request["rid"]):
        found["id"] = meta["id"]
    return found


def _entries(entries: list[Any]) -> list[Any]:
    """``[log-probability, token]`` of each entry, nested where a position has several."""
    if entries and isinstance(entries[0], list) and len(entries[0]) == 3 and not isinstance(entries[0][0], list):
        return [[None if value is None else float(value), token] for value, token, _ in entries]
    return [None if not part else _entries(part) for part in entries]


def _prompt(request: Mapping[str, Any], index: int, reference: Reference) -> list[int]:
    prompt, params = request.get("input_ids") or request.get("text"), request.get("sampling_params")
    if isinstance(prompt, list) and isinstance(prompt[0], list | str):
        prompt = prompt[index // (params.get("n", 1) if isinstance(params, Mapping) else 1)]
    return reference.encode(prompt) if isinstance(prompt, str) else list(prompt or [])


def _judged(
    entries: list[Any] | None,
    prompt: list[int],
    ids: list[int],
    spans: list[Any],
    params: Mapping[str, Any],
    reference: Reference,
) -> str:
    """Whether log-probabilities are those of the tokens, under the weights that each is said to come from."""
    if entries is None:
        return "none"
    if [token for _, token, *_ in entries] != ids:
        return "of other tokens"
    if not prompt or max(prompt) >= reference.vocab_size:
        return "of nonsense"
    worst, temperature = 0.0, params.get("temperature", 1.0)
    for version, start, end in spans or [["0", 0, len(ids)]]:
        if end > start:
            right = reference.log_probs(prompt, ids, temperature, version)[start:end]
            given = [value for value, *_ in entries[start:end]]
            worst = max(worst, *(abs(a - b) for a, b in zip(right, given, strict=True)))
    return "right" if worst <= TOLERANCE else f"off by {worst:.3f}"


# ---------------------------------------------------------------------- OpenAI's


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    found = {"finish": choice["finish_reason"], "matched": choice.get("matched_stop"), "text": text}
    ids = choice.get("response_token_ids", choice.get("token_ids"))
    if ids is not None:
        found |= {"ids": ids, "prompt_ids": choice.get("prompt_token_ids")}
    if choice.get("logprobs"):
        found["logprobs"] = _openai_log_probs(choice["logprobs"])
    if "meta_info" in choice:
        found["spans"] = [[s["version"], s["start"], s["end"]] for s in choice["meta_info"]["weight_versions"]]
    return found


def _openai_log_probs(given: Mapping[str, Any]) -> list[Any]:
    """``[token, log-probability]`` of each position."""
    if "content" in given:
        return [[entry["token"], entry["logprob"]] for entry in given["content"]]
    return [list(pair) for pair in zip(given["tokens"], given["token_logprobs"], strict=True)]


def _streamed(events: list[Any]) -> dict[str, Any]:
    """A stream as the answer that its chunks add up to."""
    rows: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for event in events:
        usage = _kept(event) if event.get("usage") else usage
        for choice in event.get("choices", []):
            row = rows.setdefault(choice["index"], {"text": "", "finish": None, "logprobs": [], "chunks": 0})
            row["text"] += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            row["finish"] = choice.get("finish_reason") or row["finish"]
            row["chunks"] += 1
            if choice.get("logprobs"):
                row["logprobs"] += _openai_log_probs(choice["logprobs"])
            for name in ("token_ids", "response_token_ids"):
                row["ids"] = row.get("ids", []) + choice[name] if choice.get(name) else row.get("ids", [])
    for row in rows.values():
        row["chunks"] = "several" if row["chunks"] > 2 else "few"
    return {"stream": True, "rows": [rows[index] for index in sorted(rows)], **usage}
