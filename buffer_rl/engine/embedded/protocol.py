"""SGLang's ``/generate``: from a request's body to engine requests, and back to the answer."""

from __future__ import annotations

import hashlib
import secrets
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from buffer_rl.engine.embedded.sampling import SamplingError, SamplingParams, is_neutral
from buffer_rl.engine.embedded.scheduler import Request
from buffer_rl.engine.rows import row_rid, row_seeds
from buffer_rl.engine.text import TextCodec

# Fields of SGLang's request that this engine does not implement, with the values that change nothing; None, False and
# what is empty change nothing either. The router sends most of them with every request.
_NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "log_metrics": (True,),
    "no_logs": (True,),
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "priority": (0,),
    "routed_experts_start_len": (0,),
    **dict.fromkeys(
        (
            *("model", "stream", "background", "input_embeds", "positional_embed_overrides", "require_reasoning"),
            *("image_data", "video_data", "audio_data", "modalities", "use_audio_in_video", "need_wait_for_mm_inputs"),
            *("num_items_assigned", "max_dynamic_patch", "min_dynamic_patch"),
            *("image_max_dynamic_patch", "video_max_dynamic_patch", "multi_item_delimiter_indices"),
            *("return_text_in_logprobs", "return_hidden_states", "return_routed_experts", "return_indexer_topk"),
            *("return_bytes", "return_entropy", "token_ids_logprob", "lora_path", "lora_id", "custom_logit_processor"),
            *("session_params", "session_id", "conversation_id", "extra_key", "routing_key", "custom_labels"),
            *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
            *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "data_parallel_rank_decode"),
            *("external_trace_header", "received_time"),
        ),
        (),
    ),
}
_FIELDS = ("rid", "input_ids", "text", "sampling_params", "return_logprob")


class BadRequestError(ValueError):
    """What a client sent is wrong: answered with status 400 and this text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request may ask for."""

    vocab_size: int
    context_length: int
    deterministic: bool
    has_tokenizer: bool


@dataclass(slots=True, kw_only=True)
class GenerateCall:
    """One HTTP request: its rows, whether the answer is a list, and which of them want log-probabilities."""

    requests: list[Request]
    as_list: bool
    return_logprob: list[bool]

    @property
    def failure(self) -> str:
        """What failed in the engine, of all requests that did; empty if none did."""
        reasons = [request.finish_reason or {} for request in self.requests]
        return "; ".join(reason["message"] for reason in reasons if reason.get("status_code") == 500)


def parse_generate(body: Any, codec: TextCodec, limits: Limits) -> GenerateCall:
    """Raises BadRequestError naming the field that is wrong."""
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    for name, value in body.items():
        if name in _FIELDS or value is None:
            continue
        if name not in _NEUTRAL_FIELDS:
            raise BadRequestError(f"field {name!r} is unknown to the embedded engine")
        if not is_neutral(value, _NEUTRAL_FIELDS[name]):
            raise BadRequestError(f"field {name!r} is not supported by the embedded engine, got {value!r:.80}")
    prompts, batched = _prompts(body, codec, limits)
    wanted = _wanted(body.get("return_logprob"), len(prompts))
    params = _sampling_params(body.get("sampling_params"), len(prompts))
    one_for_all = not isinstance(body.get("sampling_params"), list)
    if any(own.n > 1 for own in params):
        if not one_for_all:
            raise BadRequestError("'n' above 1 needs one 'sampling_params' for all prompts")
        n, batched = params[0].n, True
        prompts, params = [ids for ids in prompts for _ in range(n)], params * n
        wanted = [flag for flag in wanted for _ in range(n)]
    for prompt, own in zip(prompts, params, strict=True):
        _check_length(prompt, own, limits)
        if own.stop and not limits.has_tokenizer:
            raise BadRequestError("stop strings need a tokenizer, and the model's folder has none")
    rids = _rids(body.get("rid"), len(prompts), batched)
    seeds = _seeds(rids, params, batched and one_for_all, limits.deterministic)
    requests = [
        Request(rid=rid, prompt_ids=prompt, params=own, seed=seed)
        for rid, prompt, own, seed in zip(rids, prompts, params, seeds, strict=True)
    ]
    return GenerateCall(requests=requests, as_list=batched, return_logprob=wanted)


def answer(
    request: Request, codec: TextCodec, version: str, return_logprob: bool, return_kept: bool = False
) -> dict[str, Any]:
    """The JSON object of one finished request; ``version`` is that of the weights now.

    return_kept: with the tokens that each token was drawn from, under the names of slime's SGLang: ``top_p_token_ids``,
    all one after another, and ``top_p_token_offsets``, where each begins and the last ends; base64 of int32."""
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
        pairs = zip(request.log_probs, request.output_ids, strict=True)
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [(log_prob, token, None) for log_prob, token in pairs]
        meta["output_token_logprobs_length"] = len(request.output_ids)
    if return_kept:
        offsets = np.array([0, *accumulate(len(ids) // 4 for ids in request.kept)], dtype="<i4")
        meta["top_p_token_ids"] = b64encode(b"".join(request.kept)).decode()
        meta["top_p_token_offsets"] = b64encode(offsets.tobytes()).decode()
    return {"text": codec.output_text(request), "output_ids": request.output_ids, "meta_info": meta}


def _prompts(body: dict[str, Any], codec: TextCodec, limits: Limits) -> tuple[list[tuple[int, ...]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadRequestError("exactly one of 'input_ids' and 'text' must be given")
    if text is not None:
        if not limits.has_tokenizer:
            raise BadRequestError("'text' needs a tokenizer, and the model's folder has none")
        batched = isinstance(text, list)
        texts = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(item, str) for item in texts):
            raise BadRequestError("'text' must be a string or a list of strings")
        prompts = [tuple(codec.encode(item)) for item in texts]
    else:
        if not isinstance(ids, list) or not ids:
            raise BadRequestError("'input_ids' must be a list of token ids, or a list of such lists")
        batched = isinstance(ids[0], list)
        prompts = [tuple(item) if isinstance(item, list) else () for item in (ids if batched else [ids])]
    for prompt, before in zip(prompts, [None, *prompts[:-1]], strict=True):
        if not prompt:
            raise BadRequestError("a prompt is empty")
        if any(type(token) is not int for token in prompt):
            raise BadRequestError("token ids must be whole numbers")
        if prompt == before:  # the rows of a request often have one prompt
            continue
        if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
            raise BadRequestError(f"token ids must be in [0, {limits.vocab_size})")
    return prompts, batched


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


def _check_length(prompt: tuple[int, ...], params: SamplingParams, limits: Limits) -> None:
    if len(prompt) >= limits.context_length:
        raise BadRequestError(
            f"the input ({len(prompt)} tokens) is longer than the model's context length "
            f"({limits.context_length} tokens) allows"
        )
    total = len(prompt) + params.max_new_tokens
    if total > limits.context_length:
        raise BadRequestError(
            f"{len(prompt)} input tokens and {params.max_new_tokens} new tokens are {total}, more than the "
            f"context length of {limits.context_length}; lower max_new_tokens or shorten the prompt"
        )


def _seeds(rids: list[str], params: list[SamplingParams], is_shared: bool, deterministic: bool) -> list[int]:
    """The seed of each row: its own, or mixed from one that is shared (``row_seeds``); without one, fresh randomness,
    or a hash of the row's id in deterministic mode."""
    if is_shared and params[0].sampling_seed is not None:
        return row_seeds(params[0].sampling_seed, len(params))
    seeds = []
    for rid, own in zip(rids, params, strict=True):
        if own.sampling_seed is not None:
            seeds.append(own.sampling_seed)
        elif deterministic:
            seeds.append(int.from_bytes(hashlib.sha256(rid.encode()).digest()[:8], "little"))
        else:
            seeds.append(secrets.randbits(64))
    return seeds


def weight_version(body: Mapping[str, Any]) -> str | None:
    """The name of new weights, where a request says it. Raises BadRequestError."""
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise BadRequestError("'weight_version' must be a string")
    return version
