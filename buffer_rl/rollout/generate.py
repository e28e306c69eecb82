"""The built-in generate function: one prompt in, one response out, as tokens.

Beside it: sampling parameters, and the continuation of a response that was aborted (its tokens become part of the
prompt and stay in the sample).

Several turns in one sample: what the model writes is trained on, what a tool or an environment says is not. A user's
generate function calls ``generate_turn``, reads the text, adds the tool's answer with ``add_observation``, and
continues; see ``examples/tool_use``. Tokens are only ever appended, so every turn's request has the earlier ones as its
prefix, and log-probabilities stay with the tokens that they were computed for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from buffer_rl.args import Args
from buffer_rl.engines.text import stop_window, text_before_stop, text_to_stop
from buffer_rl.errors import RolloutError
from buffer_rl.records.experts import joined, num_recomputed
from buffer_rl.records.groups import Sample, SampleGroup, Status, VersionSpan
from buffer_rl.records.sample import STATUS_OF_REASON
from buffer_rl.rollout.lease import Lease, current_lease
from buffer_rl.rollout.prompts import data_errors
from buffer_rl.rollout.requests import answer_for, answers_for, are_first_rows

if TYPE_CHECKING:
    from buffer_rl.engines.client import GenerateResult


def sampling_params_for(args: Args, evaluation: bool) -> dict[str, Any]:
    """Sampling parameters under the names of SGLang's protocol; evaluation options fall back to the rollout's.

    ``no_stop_trim`` is true, as in slime: the text of a response is that of its tokens, up to the end of the stop
    string that ended it.
    """

    def chosen(name: str) -> Any:
        value = getattr(args, f"eval_{name}") if evaluation else None
        return getattr(args, f"rollout_{name}") if value is None else value

    params: dict[str, Any] = {
        **{name: chosen(name) for name in ("temperature", "top_p", "top_k", "min_p")},
        "max_new_tokens": chosen("max_response_len"),
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
    }
    if args.rollout_stop:
        params["stop"] = list(args.rollout_stop)
    if args.rollout_stop_token_ids:
        params["stop_token_ids"] = list(args.rollout_stop_token_ids)
    return params


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], lease: Lease | None = None) -> Sample:
    """Fill ``sample`` with one response to its prompt, sampled by the engine behind the router.

    Sets tokens, response, response_length, rollout_log_probs, weight_versions and status; loss_mask None (all
    tokens). Under ``--partial-rollout`` a response that was aborted is continued: its tokens are sent after the
    prompt, and keep their log-probabilities, versions and loss mask. Any other response that the sample had is
    replaced. lease: the current one if it is left out.
    Raises RolloutError if the prompt leaves no room in ``--rollout-max-context-len``, EngineError if the answer breaks
    the protocol.
    """
    lease = lease or current_lease()
    before = partial_response(args, sample)
    if lease.stopped:
        if not before:
            sample.response_length = 0
        sample.status = Status.ABORTED
        return sample
    prompt_ids = sample.tokens[: -len(before)] if before else lease.context.prompts.encode(sample)
    params = dict(sampling_params)
    params["max_new_tokens"] = room_for(args, sample, len(prompt_ids), params["max_new_tokens"]) - len(before)
    if before and params["max_new_tokens"] <= 0:  # the abort came with its last token
        sample.status = Status.TRUNCATED
        return sample
    sample.response_length = len(before)
    sent, known = prompt_ids + before.ids, num_experts_known(sample)
    result = await answer_for(sample, sent, params, gather=not before, lease=lease, experts_start=known)
    add_experts(sample, result, lease)
    _fill(sample, prompt_ids, before, result)
    if before:
        with data_errors("the tokenizer cannot decode the response", f"row {sample.row_id}"):
            _fix_end(lease.context.tokenizer, sample, len(before), params, getattr(result, "matched", None))
    return sample


async def generate_together(
    args: Args, samples: Sequence[Sample], sampling_params: dict[str, Any], lease: Lease
) -> bool:
    """Fill new samples of one prompt, the first of their sixteen, as ``generate`` does each of them at once, with one
    request and without a task for each. Returns False, with nothing changed, if they have to ask one by one.

    Raises as ``generate``, naming the first row."""
    first = samples[0]
    if lease.stopped or sampling_params.get("sampling_seed") is not None or not are_first_rows(samples):
        return False
    encode = lease.context.prompts.encode
    prompt_ids = encode(first)
    if any(partial_response(args, sample) or encode(sample) != prompt_ids for sample in samples):
        return False
    params = dict(sampling_params)
    params["max_new_tokens"] = room_for(args, first, len(prompt_ids), params["max_new_tokens"])
    results = await answers_for(samples, prompt_ids, params, lease)
    for sample, result in zip(samples, results, strict=False):  # none if they have to ask one by one
        sample.response_length = 0
        add_experts(sample, result, lease)
        _fill(sample, prompt_ids, _NOTHING, result)
    return bool(results)


def room_for(args: Args, sample: Sample, prompt_length: int, max_new_tokens: int) -> int:
    """How many tokens the response may have: ``max_new_tokens``, or fewer under ``--rollout-max-context-len``.

    Raises RolloutError if the prompt leaves no room."""
    limit = args.rollout_max_context_len
    if limit is None:
        return max_new_tokens
    if prompt_length >= limit:
        what = f"the prompt has {prompt_length} tokens and leaves no room for a response"
        expected = f"fewer tokens than --rollout-max-context-len {limit}"
        hint = "raise the limit; --rollout-max-prompt-len leaves longer prompts out"
        raise RolloutError(what, where=f"row {sample.row_id}", expected=expected, hint=hint)
    return int(min(max_new_tokens, limit - prompt_length))


def _fill(sample: Sample, prompt_ids: list[int], before: PartialResponse, result: GenerateResult) -> None:
    output_ids = list(result.output_ids)
    start = len(before)
    sample.tokens = prompt_ids + before.ids + output_ids
    sample.response = result.text
    sample.response_length = start + len(output_ids)
    sample.rollout_log_probs = before.log_probs + list(result.log_probs)
    kept = getattr(result, "kept", None)
    sample.rollout_kept_tokens = None if kept is None else before.kept + kept
    sample.weight_versions = before.spans + _behind(start, result.spans)
    sample.loss_mask = None if before.loss_mask is None else before.loss_mask + [1] * len(output_ids)
    sample.status = STATUS_OF_REASON[result.finish_reason]


def _behind(start: int, spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    return [VersionSpan(span.version, span.start + start, span.end + start) for span in spans]


def _fix_end(tokenizer: Any, sample: Sample, start: int, params: dict[str, Any], matched: object) -> None:
    """Correct the end and the text of a continued response to those of one generated in one piece: a stop string may
    begin in the first part, and a character may consist of tokens of both."""
    ids = sample.tokens[-sample.response_length :]
    end = end_of_straddling_stop(tokenizer, ids, start, stops_of(params))
    if end is not None and end < len(ids):
        sample.tokens = sample.tokens[: end - len(ids)]
        sample.response_length = end
        sample.rollout_log_probs = (sample.rollout_log_probs or [])[:end]
        sample.loss_mask = None if sample.loss_mask is None else sample.loss_mask[:end]
        sample.rollout_kept_tokens = sample.rollout_kept_tokens and sample.rollout_kept_tokens[:end]
        if sample.rollout_routed_experts is not None:
            sample.rollout_routed_experts = sample.rollout_routed_experts[: len(sample.tokens) - 1]
        sample.weight_versions = [
            VersionSpan(span.version, span.start, min(span.end, end))
            for span in sample.weight_versions
            if span.start < end
        ]
    if end is not None:
        sample.status, matched = Status.COMPLETED, None
    sample.response = response_text(tokenizer, ids[:end], params, matched)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialResponse:
    """The part of a response that is generated already: ``[num_tokens]`` each; empty where there is none."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    loss_mask: list[int] | None = None

    def __len__(self) -> int:
        return len(self.ids)


_NOTHING = PartialResponse()


def partial_response(args: Args, sample: Sample) -> PartialResponse:
    """The part of the sample's response to continue: under ``--partial-rollout``, that of an aborted one."""
    length = sample.response_length
    if not args.partial_rollout or sample.status is not Status.ABORTED or length == 0:
        return _NOTHING
    return PartialResponse(
        ids=list(sample.tokens[-length:]),
        log_probs=list(sample.rollout_log_probs or ()),
        spans=list(sample.weight_versions),
        kept=list(sample.rollout_kept_tokens or ()),
        loss_mask=None if sample.loss_mask is None else list(sample.loss_mask),
    )


def num_experts_known(sample: Sample) -> int:
    """Of how many tokens, from the first of the prompt on, the experts are known that go on to be."""
    known = sample.rollout_routed_experts if sample.response_length else None
    return 0 if known is None else len(known)


def add_experts(sample: Sample, answer: GenerateResult, lease: Lease) -> None:
    """Add to ``rollout_routed_experts`` what is new in an answer whose tokens the sample does not have yet. What an
    evaluation generates is not trained on, and needs none."""
    found = None if lease.evaluation else getattr(answer, "experts", None)
    if not sample.response_length:
        sample.rollout_routed_experts = found
        sample.__dict__.pop("experts_recomputed", None)
    elif answer.output_ids:
        sample.rollout_routed_experts = joined(
            sample.rollout_routed_experts, found, getattr(answer, "experts_start", 0)
        )
    if found is not None and (recomputed := num_recomputed(answer.spans)):
        sample.experts_recomputed += recomputed


def reset_to_prompt(sample: Sample) -> Sample:
    """The sample with its prompt alone."""
    return SampleGroup(uid=sample.row_id.uid, samples=[sample]).as_prompts()[0]


def stops_of(params: dict[str, Any]) -> list[str]:
    """The stop strings of sampling parameters."""
    stops = params.get("stop") or []
    return [stops] if isinstance(stops, str) else list(stops)


def end_of_straddling_stop(tokenizer: Any, ids: Sequence[int], start: int, stops: Sequence[str]) -> int | None:
    """The length of the response up to a stop string that begins before token ``start`` and ends after it; None if
    there is none. An engine that continues from ``start`` does not see such a stop string.
    """
    if not stops or start == 0:
        return None
    width = stop_window(stops)
    first = max(0, start - width)
    head = tokenizer.decode(ids[first:start], skip_special_tokens=False)
    for end in range(start + 1, min(len(ids), start + width) + 1):
        tail = tokenizer.decode(ids[first:end], skip_special_tokens=False)
        if any(stop in tail and stop not in head for stop in stops):
            return end
    return None


def response_text(tokenizer: Any, ids: Sequence[int], params: dict[str, Any], matched: object) -> str:
    """Text of a whole response, as an engine gives it for these sampling parameters. matched: the token, or the string,
    that stopped it."""
    skip_special_tokens = bool(params.get("skip_special_tokens", True))

    def decode(chosen: Sequence[int], skip: bool) -> str:
        return str(tokenizer.decode(list(chosen), skip_special_tokens=skip))

    if params.get("no_stop_trim"):
        return text_to_stop(decode, ids, stops_of(params), skip_special_tokens)
    shown = ids[:-1] if isinstance(matched, int) and ids and ids[-1] == matched else ids
    return text_before_stop(decode, shown, stops_of(params), skip_special_tokens)


async def generate_turn(args: Any, sample: Sample, sampling_params: dict[str, Any], lease: Lease | None = None) -> str:
    """Have the engine continue the sample's tokens (the prompt, on the first turn), and return the new text.

    Appends to tokens, response, rollout_log_probs, rollout_kept_tokens, rollout_routed_experts, loss_mask (1) and
    weight_versions, and sets status: ``completed`` if the model ended the turn, also by a stop string; ``truncated`` if
    there is no room; ``aborted`` if the rollout does not need the sample any more (``--over-sampling-batch-size``): end
    there. ``max_new_tokens`` bounds the whole response, all turns and observations together, and so does
    ``--rollout-max-context-len`` with the prompt. lease: the current one if it is left out. Raises RolloutError if a
    prompt alone fills the context, EngineError if the engine refuses or its answer breaks the protocol.
    """
    lease = lease or current_lease()
    if lease.stopped:
        sample.status = Status.ABORTED
        return ""
    if not sample.response_length:
        sample.tokens, sample.response = lease.context.prompts.encode(sample), ""
        sample.rollout_log_probs, sample.loss_mask, sample.weight_versions = [], [], []
        sample.rollout_kept_tokens = []
    most = room_for(args, sample, sample.prompt_length, sampling_params["max_new_tokens"])
    if (room := most - sample.response_length) < 1:
        sample.status = Status.TRUNCATED
        return ""
    params, known = {**sampling_params, "max_new_tokens": room}, num_experts_known(sample)
    answer = await answer_for(sample, sample.tokens, params, lease=lease, experts_start=known)
    add_experts(sample, answer, lease)
    sample.weight_versions += _behind(sample.response_length, answer.spans)
    _append(sample, list(answer.output_ids), list(answer.log_probs), answer.text, getattr(answer, "kept", None), mask=1)
    sample.status = STATUS_OF_REASON[answer.finish_reason]
    return answer.text


def add_observation(sample: Sample, text: str, lease: Lease | None = None) -> None:
    """Append what a tool or an environment says: its tokens, with loss_mask 0, log-probability 0 and no kept tokens."""
    tokens = (lease or current_lease()).context.prompts.encode_text(text, where=f"row {sample.row_id}")
    _append(sample, tokens, [0.0] * len(tokens), text, [b""] * len(tokens), mask=0)


def _append(
    sample: Sample, tokens: list[int], log_probs: list[float], text: str, kept: list[bytes] | None, *, mask: int
) -> None:
    if sample.rollout_log_probs is None or sample.loss_mask is None:
        what = "an observation comes after a turn"
        raise RolloutError(what, where=f"row {sample.row_id}", expected="generate_turn first")
    sample.tokens = [*sample.tokens, *tokens]
    sample.rollout_log_probs = [*sample.rollout_log_probs, *log_probs]
    sample.loss_mask = [*sample.loss_mask, *[mask] * len(tokens)]
    before = sample.rollout_kept_tokens
    sample.rollout_kept_tokens = None if before is None or kept is None else [*before, *kept]
    sample.response += text
    sample.response_length += len(tokens)
