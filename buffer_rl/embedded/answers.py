"""SGLang's answer of ``/generate``: finished engine requests as JSON objects."""

from __future__ import annotations

from base64 import b64encode
from itertools import accumulate, repeat
from typing import Any

import numpy as np

from buffer_rl.embedded.log_probs import LogProbDetails, Pair
from buffer_rl.embedded.protocol import GenerateCall
from buffer_rl.embedded.scheduler import Request
from buffer_rl.engines.text import TextCodec


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
