"""The built-in generate function: one prompt in, one response out, as tokens."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from buffer_rl.errors import EngineError, RolloutError
from buffer_rl.rollout.context import Generated, current_context, current_scope
from buffer_rl.rollout.continuing import SoFar, end_of_straddling_stop, response_text, so_far, stops_of
from buffer_rl.rollout.requests import Requests
from buffer_rl.types import GroupUid, Sample, Status, VersionSpan

SEED_BITS = 31  # the widest seed that every engine and every random generator behind one accepts

_STATUS_OF = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def sampling_params_for(args: Any, evaluation: bool) -> dict[str, Any]:
    """Sampling parameters under the names of SGLang's protocol; evaluation options fall back to the rollout's."""

    def chosen(name: str) -> Any:
        value = getattr(args, f"eval_{name}") if evaluation else None
        return getattr(args, f"rollout_{name}") if value is None else value

    params: dict[str, Any] = {
        "temperature": chosen("temperature"),
        "top_p": chosen("top_p"),
        "top_k": chosen("top_k"),
        "min_p": chosen("min_p"),
        "max_new_tokens": chosen("max_response_len"),
        "skip_special_tokens": args.rollout_skip_special_tokens,
    }
    if args.rollout_stop:
        params["stop"] = list(args.rollout_stop)
    if args.rollout_stop_token_ids:
        params["stop_token_ids"] = list(args.rollout_stop_token_ids)
    return params


def sampling_seed(run_seed: int, uid: GroupUid, sample_index: int) -> int:
    """The sample's seed, ``0 <= seed < 2**31``: a function of its arguments alone, equal on every machine."""
    digest = blake2b(f"{run_seed}|{uid}|{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def request_id(sample: Sample) -> str:
    """The request's ``rid``: the same for a retry of one lease, different for every other lease and turn."""
    scope = current_scope()
    turn = f"+{sample.response_length}" if sample.response_length else ""
    return f"{scope.task}:{sample.row_id}:{scope.attempt}:{scope.incarnation}{turn}"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Fill ``sample`` with one response to its prompt, sampled by the engine behind the router.

    Sets tokens, response, response_length, rollout_log_probs, weight_versions and status; loss_mask None (all
    tokens). Under ``--partial-rollout`` a response that was aborted is continued: its tokens are sent after the
    prompt, and keep their log-probabilities, versions and loss mask. Any other response that the sample had is
    replaced. Raises RolloutError if the prompt leaves no room in ``--rollout-max-context-len``, EngineError if the
    answer breaks the protocol.
    """
    context = current_context()
    if context.engine is None:
        raise RolloutError("this rollout has no engine", hint="remove uses_engine = False from the rollout function")
    requests = current_scope().requests or Requests()
    before = so_far(args, sample)
    if requests.stopped:
        if not before:
            sample.response_length = 0
        sample.status = Status.ABORTED
        return sample
    prompt_ids = sample.tokens[: -len(before)] if before else context.prompts.encode(sample)
    params = dict(sampling_params)
    params["max_new_tokens"] = _room(args, sample, len(prompt_ids), params["max_new_tokens"]) - len(before)
    if before and params["max_new_tokens"] <= 0:  # it was aborted with its last token
        sample.status = Status.TRUNCATED
        return sample
    params["sampling_seed"] = sampling_seed(context.seed, sample.row_id.uid, sample.sample_index)
    sample.response_length = len(before)
    try:
        result = await requests.ask(context.engine, request_id(sample), prompt_ids + before.ids, params)
    except EngineError as error:  # it names the engine; which prompt the engine refuses is known here only
        where = f"row {sample.row_id}, {error.where}".removesuffix(", ")
        named = EngineError(error.what, where=where, expected=error.expected, hint=error.hint)
        named.status = error.status
        raise named from error
    _fill(sample, prompt_ids, before, result)
    if before:
        _mend_end(context.tokenizer, sample, len(before), params, getattr(result, "matched", None))
    return sample


def _room(args: Any, sample: Sample, prompt_length: int, max_new_tokens: int) -> int:
    limit = args.rollout_max_context_len
    if limit is None:
        return max_new_tokens
    if prompt_length >= limit:
        raise RolloutError(
            f"the prompt has {prompt_length} tokens and leaves no room for a response",
            where=f"row {sample.row_id}",
            expected=f"fewer tokens than --rollout-max-context-len {limit}",
            hint="raise the limit or remove the row",
        )
    return int(min(max_new_tokens, limit - prompt_length))


def _fill(sample: Sample, prompt_ids: list[int], before: SoFar, result: Generated) -> None:
    output_ids = list(result.output_ids)
    log_probs = list(result.log_probs)
    if len(log_probs) != len(output_ids):
        raise EngineError(
            f"{len(output_ids)} tokens came with {len(log_probs)} log-probabilities", where=f"row {sample.row_id}"
        )
    if result.finish_reason not in _STATUS_OF:
        raise EngineError(
            f"unknown finish reason {result.finish_reason!r}",
            where=f"row {sample.row_id}",
            expected=", ".join(_STATUS_OF),
        )
    start = len(before)
    spans = [VersionSpan(span.version, span.start + start, span.end + start) for span in result.spans]
    sample.tokens = prompt_ids + before.ids + output_ids
    sample.response = result.text
    sample.response_length = start + len(output_ids)
    sample.rollout_log_probs = before.log_probs + log_probs
    sample.weight_versions = before.spans + spans
    sample.loss_mask = None if before.loss_mask is None else before.loss_mask + [1] * len(output_ids)
    sample.status = _STATUS_OF[result.finish_reason]


def _mend_end(tokenizer: Any, sample: Sample, start: int, params: dict[str, Any], matched: object) -> None:
    """Give a continued response the end and the text that it would have had in one piece: a stop string may have
    begun in the first part, and a character may be made of tokens of both."""
    ids = sample.tokens[-sample.response_length :]
    stops, skip = stops_of(params), bool(params.get("skip_special_tokens", True))
    end = end_of_straddling_stop(tokenizer, ids, start, stops, skip)
    if end is not None and end < len(ids):
        sample.tokens = sample.tokens[: end - len(ids)]
        sample.response_length = end
        sample.rollout_log_probs = (sample.rollout_log_probs or [])[:end]
        sample.loss_mask = None if sample.loss_mask is None else sample.loss_mask[:end]
        sample.weight_versions = [
            VersionSpan(span.version, span.start, min(span.end, end))
            for span in sample.weight_versions
            if span.start < end
        ]
    if end is not None:
        sample.status, matched = Status.COMPLETED, None
    sample.response = response_text(tokenizer, ids[:end], stops, matched, skip)
