"""SGLang's ``/generate``: from a request's body to engine requests, and from finished ones to the answer."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from typing import Any

import numpy as np

from buffer_rl.embedded.sampling import MAX_ROWS, LogProbDetails, Pair, SamplingError, SamplingParams
from buffer_rl.embedded.scheduler import Request
from buffer_rl.engines.protocol import CONTEXT_LENGTH_EXCEEDED, BadRequestError, is_neutral, row_rid, row_seeds
from buffer_rl.engines.text import TextCodec

# Fields of SGLang's request that name or trace a request, or otherwise change no answer of one engine.
_IGNORED_FIELDS = frozenset(
    (
        *("model", "background", "priority", "log_metrics", "no_logs", "received_time", "external_trace_header"),
        *("session_id", "conversation_id", "extra_key", "routing_key", "custom_labels", "routed_dp_rank"),
        *("data_parallel_rank", "data_parallel_rank_decode", "disagg_prefill_dp_rank", "decode_tp_size"),
        *("num_items_assigned", "need_wait_for_mm_inputs"),
        "return_sampling_mask",  # --return-kept-tokens sends them with every answer
    )
)
# Fields that this engine does not implement; None, False and what is empty change nothing. The router sends most of
# them with every request.
_UNSUPPORTED_FIELDS = frozenset(
    (
        *("input_embeds", "positional_embed_overrides", "require_reasoning"),
        *("image_data", "video_data", "audio_data", "modalities", "use_audio_in_video"),
        *("max_dynamic_patch", "min_dynamic_patch"),
        *("image_max_dynamic_patch", "video_max_dynamic_patch", "multi_item_delimiter_indices"),
        *("return_text_in_logprobs", "return_hidden_states", "return_indexer_topk"),
        *("return_bytes", "return_entropy", "lora_id", "custom_logit_processor", "session_params"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    )
)
_FIELDS = (
    *("rid", "input_ids", "text", "sampling_params", "stream", "lora_path"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_routed_experts", "routed_experts_start_len"),
)


MAX_TOP = 1024
"""Most of the likeliest tokens of a position that an answer has."""


LONG_TEXT = 10_000
"""Characters that are encoded in a few milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request may ask for.

    longest_prompt, longest_sequence: in tokens; a longer prompt is refused, a longer sequence ends there. padded_vocab:
    token ids from ``vocab_size`` on and below it are taken for 0. refuses: what is wrong or unknown is answered with an
    error; where it is False, the server behaves as SGLang, which ignores it or dies of it. keeps_seeds: the seeds of
    requests count. mixes_seeds: the rows of a request draw under seeds mixed from its one seed. returns_experts:
    answers have the experts that computed their tokens."""

    vocab_size: int
    context_length: int
    deterministic: bool
    has_tokenizer: bool
    longest_prompt: int
    longest_sequence: int
    padded_vocab: int
    refuses: bool = True
    keeps_seeds: bool = True
    mixes_seeds: bool = True
    returns_experts: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class GenerateCall:
    """One HTTP request: its rows, whether the answer is a list, and which of them want log-probabilities.

    stream: it is answered while it runs. left: how many rows are not done yet. on_done: called when all are."""

    requests: list[Request]
    as_list: bool
    return_logprob: list[bool]
    left: int
    stream: bool = False
    on_done: Callable[[], object] | None = None
    engine_failure: str = ""

    @property
    def done(self) -> bool:
        """Whether all rows are done, or the engine has failed."""
        return not self.left

    @property
    def failure(self) -> str:
        """What failed in the engine, of all requests that did; empty if none did."""
        if self.engine_failure:
            return self.engine_failure
        reasons = [request.finish_reason for request in self.requests if request.finish_reason]
        return "; ".join([reason["message"] for reason in reasons if reason.get("status_code") == 500])


def has_long_text(body: Any) -> bool:
    """Whether the prompts of a request are texts that take a while to encode."""
    text = body.get("text") if isinstance(body, dict) else None
    return sum(len(item) for item in (text if isinstance(text, list) else [text]) if isinstance(item, str)) > LONG_TEXT


def parse_generate(body: Any, codec: TextCodec, limits: Limits) -> GenerateCall:
    """Raises BadRequestError naming the field that is wrong."""
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    for name, value in body.items():
        if name in _FIELDS or name in _IGNORED_FIELDS or value is None or not limits.refuses:
            continue
        if name not in _UNSUPPORTED_FIELDS:
            raise BadRequestError(f"field {name!r} is unknown to the embedded engine")
        if not is_neutral(value, ()):
            raise BadRequestError(f"field {name!r} is not supported by the embedded engine, got {value!r:.80}")
    prompts, batched = _prompts(body, codec, limits)
    wanted = _wanted(body.get("return_logprob"), len(prompts))
    details = _details(body, prompts, wanted, limits)
    params = _sampling_params(body.get("sampling_params"), len(prompts))
    one_for_all = not isinstance(body.get("sampling_params"), list)
    if (num_rows := len(prompts) * params[0].n) > MAX_ROWS:
        raise BadRequestError(f"the request is for {num_rows} rows, more than {MAX_ROWS}; send several")
    if any(own.n > 1 for own in params):
        if not one_for_all:
            raise BadRequestError("'n' above 1 needs one 'sampling_params' for all prompts")
        n, batched = params[0].n, True
        prompts, params = [ids for ids in prompts for _ in range(n)], params * n
        wanted = [flag for flag in wanted for _ in range(n)]
        details = [own and own.fresh() for own in details for _ in range(n)]
    fitted: dict[tuple[int, int], SamplingParams] = {}  # the rows of a request share objects
    for row, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        if (key := (id(prompt), id(own))) not in fitted:
            fitted[key] = _fitted(prompt, own, limits)
        params[row] = fitted[key]
    for own in fitted.values():
        if own.stop and not limits.has_tokenizer:
            raise BadRequestError("stop strings need a tokenizer, and the model's folder has none")
        if any(not 0 <= token < limits.vocab_size for token in own.stop_token_ids):
            raise BadRequestError(f"'stop_token_ids' must be token ids in [0, {limits.vocab_size})")
    names_rows = limits.refuses or len(prompts) == 1 or params[0].n == 1  # SGLang makes up the ids of n samples
    rids = _rids(body.get("rid") if names_rows else None, len(prompts), batched)
    seeds = _seeds(rids, params, batched and one_for_all, limits)
    adapter = body.get("lora_path") or ""
    if not isinstance(adapter, str):
        raise BadRequestError("'lora_path' must be the name of an adapter")
    start = _experts_start(body, prompts, limits)
    requests = [
        Request(rid=rid, prompt_ids=prompt, params=own, seed=seed, adapter=adapter, details=more, experts_start=start)
        for rid, prompt, own, seed, more in zip(rids, prompts, params, seeds, details, strict=True)
    ]
    stream, left = bool(body.get("stream")), len(requests)
    return GenerateCall(requests=requests, as_list=batched, return_logprob=wanted, left=left, stream=stream)


def _experts_start(body: dict[str, Any], prompts: list[tuple[int, ...]], limits: Limits) -> int:
    """The first token whose experts are asked for. A server that has them sends them with every answer: a router may
    drop the field that asks."""
    if not limits.returns_experts:
        for name in ("return_routed_experts", "routed_experts_start_len") if limits.refuses else ():
            if not is_neutral(body.get(name), (0,)):
                what = f"field {name!r} is not supported by the embedded engine without --return-routed-experts"
                raise BadRequestError(f"{what}, got {body[name]!r:.80}")
        return 0
    start, longest = body.get("routed_experts_start_len") or 0, min(map(len, prompts))
    if type(start) is not int or not 0 <= start <= longest:
        raise BadRequestError(f"'routed_experts_start_len' must be in [0, {longest}], got {start!r:.80}")
    return start


def _prompts(body: dict[str, Any], codec: TextCodec, limits: Limits) -> tuple[list[tuple[int, ...]], bool]:
    """The prompts, and whether they came as a list. Of 'input_ids' and 'text' the former counts."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise BadRequestError("'input_ids' or 'text' must be given")
    if ids is None:
        if not limits.has_tokenizer:
            raise BadRequestError("'text' needs a tokenizer, and the model's folder has none")
        batched = isinstance(text, list)
        texts: list[Any] = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(item, str) for item in texts):
            raise BadRequestError("'text' must be a string or a list of strings")
        prompts = [tuple(codec.encode(item)) for item in texts]
    else:
        if not isinstance(ids, list) or not ids:
            raise BadRequestError("'input_ids' must be a list of token ids, or a list of such lists")
        batched = isinstance(ids[0], list)
        prompts = [tuple(item) if isinstance(item, list) else () for item in (ids if batched else [ids])]
    for row, prompt in enumerate(prompts):
        if not prompt:
            if not limits.refuses and row:  # SGLang answers from the state that its neighbour left behind
                prompts[row] = prompts[row - 1]
                continue
            raise _unbearable("a prompt is empty", limits)
        if set(map(type, prompt)) != {int}:
            raise BadRequestError("token ids must be whole numbers")
        if row and prompt == prompts[row - 1]:  # the rows of a request often have one prompt
            prompts[row] = prompts[row - 1]
        elif min(prompt) < 0 or max(prompt) >= limits.padded_vocab:
            raise _unbearable(f"token ids must be in [0, {limits.vocab_size})", limits)
        elif max(prompt) >= limits.vocab_size:
            prompts[row] = tuple(0 if token >= limits.vocab_size else token for token in prompt)
    return prompts, batched


def _unbearable(message: str, limits: Limits) -> BadRequestError:
    """The error of a request that ends a SGLang server, and this process where it behaves as one."""
    if not limits.refuses:
        print(f"as SGLang, the server ends: {message}", file=sys.stderr, flush=True)
        os._exit(1)
    return BadRequestError(message)


def _sampling_params(raw: Any, count: int) -> list[SamplingParams]:
    items = raw if isinstance(raw, list) else [raw or {}] * count
    if len(items) != count or not all(isinstance(item, dict) for item in items):
        raise BadRequestError("'sampling_params' must be an object, or a list with one object a prompt")
    try:
        if not isinstance(raw, list):
            return [SamplingParams.parse(items[0])] * count
        return [SamplingParams.parse(item) for item in items]
    except SamplingError as error:
        raise BadRequestError(str(error)) from error


def _wanted(raw: Any, count: int) -> list[bool]:
    flags = raw if isinstance(raw, list) else [raw or False] * count
    if len(flags) != count or not all(isinstance(flag, bool) for flag in flags):
        raise BadRequestError("'return_logprob' must be true or false, or a list with one of them a prompt")
    return flags


def _rids(raw: Any, count: int, batched: bool) -> list[str]:
    if raw is None:
        return [secrets.token_hex(16) for _ in range(count)]
    if isinstance(raw, str):
        rids = [row_rid(raw, row) for row in range(count)] if batched else [raw]
    elif isinstance(raw, list) and all(isinstance(item, str) for item in raw):
        rids = raw
    else:
        raise BadRequestError("'rid' must be a string, or a list of strings for a batch")
    if len(rids) != count or len(set(rids)) != count:
        raise BadRequestError(f"'rid' must name each of the {count} prompts once")
    return rids


def _fitted(prompt: tuple[int, ...], params: SamplingParams, limits: Limits) -> SamplingParams:
    """``params`` with no more new tokens than fit ``longest_sequence``."""
    if len(prompt) > limits.longest_prompt:
        what = f"the input ({len(prompt)} tokens) is longer than the model's context length"
        raise BadRequestError(f"{what} ({limits.context_length} tokens) allows", code=CONTEXT_LENGTH_EXCEEDED)
    total = len(prompt) + params.max_new_tokens
    if total > limits.context_length:
        what = f"{len(prompt)} input tokens and {params.max_new_tokens} new tokens are {total}"
        most, hint = f"the context length of {limits.context_length}", "lower max_new_tokens or shorten the prompt"
        raise BadRequestError(f"{what}, more than {most}; {hint}", code=CONTEXT_LENGTH_EXCEEDED)
    if total <= limits.longest_sequence:
        return params
    fits = limits.longest_sequence - len(prompt)
    return replace(params, max_new_tokens=fits, min_new_tokens=min(fits, params.min_new_tokens))


def _details(
    body: dict[str, Any], prompts: list[tuple[int, ...]], wanted: list[bool], limits: Limits
) -> list[LogProbDetails | None]:
    """What each row wants besides the log-probabilities of its drawn tokens."""
    count, start_len = len(prompts), body.get("logprob_start_len", -1)
    if start_len in (None, -1) and not (body.get("top_logprobs_num") or body.get("token_ids_logprob")):
        return [None] * count
    raw_ids = body.get("token_ids_logprob") or []
    if not isinstance(raw_ids, list):
        raise BadRequestError("'token_ids_logprob' must be a list of token ids, or a list with one a prompt")
    starts = _each(body.get("logprob_start_len"), count, -1, "logprob_start_len")
    tops = _each(body.get("top_logprobs_num"), count, 0, "top_logprobs_num")
    named = raw_ids if raw_ids and isinstance(raw_ids[0], list) else [raw_ids] * count
    if len(named) != count or not all(isinstance(ids, list | None) for ids in named):
        raise BadRequestError(f"'token_ids_logprob' must have one list for each of the {count} prompts")
    most = min(limits.vocab_size, MAX_TOP)
    details: list[LogProbDetails | None] = []
    for prompt, is_wanted, start, top, ids in zip(prompts, wanted, starts, tops, named, strict=True):
        if not -1 <= start <= len(prompt):
            raise BadRequestError(f"'logprob_start_len' must be -1 or in [0, {len(prompt)}], got {start}")
        if not 0 <= top <= most:
            raise BadRequestError(f"'top_logprobs_num' must be in [0, {most}], got {top}")
        if any(type(token) is not int or not 0 <= token < limits.vocab_size for token in ids or ()):
            raise BadRequestError(f"'token_ids_logprob' must be token ids in [0, {limits.vocab_size})")
        own = LogProbDetails(start=start if 0 <= start < len(prompt) else None, top=top, ids=tuple(ids or ()))
        details.append(own if is_wanted else None)
    return details


def _each(raw: Any, count: int, default: int, name: str) -> list[int]:
    values = raw if isinstance(raw, list) else [raw] * count
    values = [default if value is None else value for value in values]
    if len(values) != count or any(type(value) is not int for value in values):
        raise BadRequestError(f"{name!r} must be a whole number, or a list with one a prompt")
    return values


def _seeds(rids: list[str], params: list[SamplingParams], is_shared: bool, limits: Limits) -> list[int]:
    """The seed of each row: its own, or mixed from one that is shared (``row_seeds``); without one, fresh randomness,
    or a hash of the row's id in deterministic mode."""
    if not limits.keeps_seeds:
        return [secrets.randbits(64) for _ in rids]
    if is_shared and limits.mixes_seeds and params[0].sampling_seed is not None:
        return row_seeds(params[0].sampling_seed, len(params))

    def unseeded(rid: str) -> int:
        if not limits.deterministic:
            return secrets.randbits(64)
        return int.from_bytes(hashlib.sha256(rid.encode()).digest()[:8], "little")

    pairs = zip(rids, params, strict=True)
    return [unseeded(rid) if own.sampling_seed is None else own.sampling_seed for rid, own in pairs]


def weight_version(body: Mapping[str, Any]) -> str | None:
    """The name of new weights, where a request says it. Raises BadRequestError."""
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise BadRequestError("'weight_version' must be a string")
    return version


def answers(call: GenerateCall, codec: TextCodec, version: str, return_kept: bool) -> list[dict[str, Any]]:
    """The JSON object of each row of ``call``; ``version`` is that of the weights now.

    return_kept: with the tokens that each token was drawn from, under the names of slime's SGLang: ``top_p_token_ids``,
    all one after another, and ``top_p_token_offsets``, where each begins and the last ends; base64 of int32."""
    texts = codec.output_texts(call.requests)
    rows = zip(call.requests, texts, call.return_logprob, strict=True)
    return [
        {
            "text": text,
            "output_ids": request.output_ids,
            "meta_info": meta_info(request, version, return_logprob, return_kept),
        }
        for request, text, return_logprob in rows
    ]


def meta_info(request: Request, version: str, return_logprob: bool, return_kept: bool) -> dict[str, Any]:
    """What an answer says about itself."""
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(request.output_ids),
        "cached_tokens": request.cached_tokens,
        "num_retractions": request.num_retractions,
        "weight_version": version,
        "weight_versions": request.version_spans(),
        "e2e_latency": request.finished - request.created,
    }
    if return_logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = list(zip(request.log_probs, request.output_ids, repeat(None), strict=False))
        meta["output_token_logprobs_length"] = len(request.output_ids)
        if request.details is not None:
            meta |= _more_log_probs(request.prompt_ids, request.details)
    if return_kept:
        offsets = np.array([0, *accumulate(len(ids) // 4 for ids in request.kept)], dtype="<i4")
        meta["top_p_token_ids"] = b64encode(b"".join(request.kept)).decode()
        meta["top_p_token_offsets"] = b64encode(offsets.tobytes()).decode()
    if request.row.experts is not None and request.finish_reason is not None:  # the pieces of a stream have none
        experts = np.concatenate(request.row.experts)[request.experts_start :].astype("<i4")
        meta["routed_experts"] = b64encode(experts.tobytes()).decode()
        meta["routed_experts_start_len"] = request.experts_start
    return meta


def _more_log_probs(prompt: tuple[int, ...], details: LogProbDetails) -> dict[str, Any]:
    """Entries are ``[log-probability, token id, null]``; the first position of the prompt has no log-probability."""
    meta: dict[str, Any] = {}
    has_input = details.start is not None
    if details.start is not None:
        values = [None, *details.input_log_probs]
        meta["input_token_logprobs"] = list(zip(values, prompt[details.start :], repeat(None), strict=False))
    if details.top:
        meta["input_top_logprobs"] = [None, *map(_entries, details.input_top)] if has_input else []
        meta["output_top_logprobs"] = list(map(_entries, details.output_top))
    if details.ids:
        meta["input_token_ids_logprobs"] = [None, *map(_entries, details.input_ids)] if has_input else []
        meta["output_token_ids_logprobs"] = list(map(_entries, details.output_ids))
    return meta


def _entries(pairs: list[Pair]) -> list[tuple[float, int, None]]:
    return [(log_prob, token, None) for log_prob, token in pairs]
