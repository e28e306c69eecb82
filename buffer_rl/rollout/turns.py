"""Several turns in one sample: what the model writes is trained on, what a tool or an environment says is not.

A generate function of one's own calls ``generate_turn``, looks at the text, adds what the tool says with
``add_observation``, and goes on; ``examples/tool_use`` is one. Tokens are only ever appended, so every turn's request
has the earlier ones as its prefix, and log-probabilities stay with the tokens that they were computed for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from buffer_rl.errors import EngineError, RolloutError
from buffer_rl.rollout.context import current_context
from buffer_rl.rollout.generate import request_id, sampling_seed
from buffer_rl.types import Sample, Status

_STATUS_OF = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


async def generate_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> str:
    """Let the engine go on after the sample's tokens (the prompt, on the first turn), and return the new text.

    Appends to tokens, response, rollout_log_probs, loss_mask (1) and weight_versions, and sets status: ``completed`` if
    the model ended the turn, also by a stop string; ``truncated`` where there is no room. ``max_new_tokens`` bounds
    the whole response, all turns and observations together, and so does ``--rollout-max-context-len`` with the prompt.
    Raises RolloutError if a prompt alone fills the context, EngineError if the engine refuses.
    """
    context = current_context()
    if context.engine is None:
        raise RolloutError("this rollout has no engine", where=f"row {sample.row_id}")
    if not sample.response_length:
        _begin(sample, context.prompts.encode(sample))
    room = _room(args, sample, sampling_params["max_new_tokens"])
    if room < 1:
        sample.status = Status.TRUNCATED
        return ""
    seed = sampling_seed(context.seed, sample.row_id.uid, sample.sample_index)
    params = {**sampling_params, "max_new_tokens": room, "sampling_seed": seed}
    try:
        answer = await context.engine.agenerate(request_id(sample), sample.tokens, params)
    except EngineError as error:  # it names the engine; which prompt the engine refuses is known here only
        where = f"row {sample.row_id}, {error.where}".removesuffix(", ")
        named = EngineError(error.what, where=where, expected=error.expected, hint=error.hint)
        named.status = error.status
        raise named from error
    start = sample.response_length
    sample.weight_versions += [replace(s, start=s.start + start, end=s.end + start) for s in answer.spans]
    _append(sample, list(answer.output_ids), list(answer.log_probs), answer.text, mask=1)
    sample.status = _STATUS_OF[answer.finish_reason]
    return answer.text


def add_observation(sample: Sample, text: str) -> None:
    """Append what a tool or an environment says: its tokens, with loss_mask 0 and log-probability 0."""
    tokens = current_context().prompts.encode_text(text)
    _append(sample, tokens, [0.0] * len(tokens), text, mask=0)


def _begin(sample: Sample, prompt_ids: list[int]) -> None:
    sample.tokens, sample.response = prompt_ids, ""
    sample.rollout_log_probs, sample.loss_mask, sample.weight_versions = [], [], []


def _append(sample: Sample, tokens: list[int], log_probs: list[float], text: str, *, mask: int) -> None:
    if sample.rollout_log_probs is None or sample.loss_mask is None:
        raise RolloutError(
            "an observation comes after a turn", where=f"row {sample.row_id}", expected="generate_turn first"
        )
    sample.tokens = [*sample.tokens, *tokens]
    sample.rollout_log_probs = [*sample.rollout_log_probs, *log_probs]
    sample.loss_mask = [*sample.loss_mask, *[mask] * len(tokens)]
    sample.response += text
    sample.response_length += len(tokens)


def _room(args: Any, sample: Sample, max_new_tokens: int) -> int:
    left = max_new_tokens - sample.response_length
    limit = args.rollout_max_context_len
    if limit is not None and sample.prompt_length >= limit:
        raise RolloutError(
            f"the prompt has {sample.prompt_length} tokens and leaves no room for a response",
            where=f"row {sample.row_id}",
            expected=f"fewer tokens than --rollout-max-context-len {limit}",
        )
    return int(left if limit is None else min(left, limit - len(sample.tokens)))
