"""Several turns in one sample: what the model writes is trained on, what a tool or an environment says is not.

A user's generate function calls ``generate_turn``, reads the text, adds the tool's answer with ``add_observation``,
and continues; see ``examples/tool_use``. Tokens are only ever appended, so every turn's request has the earlier ones as
its prefix, and log-probabilities stay with the tokens that they were computed for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import Sample, Status
from buffer_rl.records.sample import STATUS_OF_REASON
from buffer_rl.rollout.context import current_context
from buffer_rl.rollout.generate import room_for
from buffer_rl.rollout.requests import answer_for, is_stopped


async def generate_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> str:
    """Have the engine continue the sample's tokens (the prompt, on the first turn), and return the new text.

    Appends to tokens, response, rollout_log_probs, rollout_kept_tokens, loss_mask (1) and weight_versions, and sets
    status: ``completed`` if the model ended the turn, also by a stop string; ``truncated`` where there is no room;
    ``aborted`` where the rollout does not need the sample any more (``--over-sampling-batch-size``): end there.
    ``max_new_tokens`` bounds the whole response, all turns and observations together, and so does
    ``--rollout-max-context-len`` with the prompt.
    Raises RolloutError if a prompt alone fills the context, EngineError if the engine refuses or its answer breaks the
    protocol.
    """
    if is_stopped():
        sample.status = Status.ABORTED
        return ""
    if not sample.response_length:
        _begin(sample, current_context().prompts.encode(sample))
    most = room_for(args, sample, sample.prompt_length, sampling_params["max_new_tokens"])
    if (room := most - sample.response_length) < 1:
        sample.status = Status.TRUNCATED
        return ""
    answer = await answer_for(sample, sample.tokens, {**sampling_params, "max_new_tokens": room})
    start = sample.response_length
    sample.weight_versions += [replace(s, start=s.start + start, end=s.end + start) for s in answer.spans]
    _append(sample, list(answer.output_ids), list(answer.log_probs), answer.text, getattr(answer, "kept", None), mask=1)
    sample.status = STATUS_OF_REASON[answer.finish_reason]
    return answer.text


def add_observation(sample: Sample, text: str) -> None:
    """Append what a tool or an environment says: its tokens, with loss_mask 0, log-probability 0 and no kept tokens."""
    tokens = current_context().prompts.encode_text(text, where=f"row {sample.row_id}")
    _append(sample, tokens, [0.0] * len(tokens), text, [b""] * len(tokens), mask=0)


def _begin(sample: Sample, prompt_ids: list[int]) -> None:
    sample.tokens, sample.response = prompt_ids, ""
    sample.rollout_log_probs, sample.loss_mask, sample.weight_versions = [], [], []
    sample.rollout_kept_tokens = []


def _append(
    sample: Sample, tokens: list[int], log_probs: list[float], text: str, kept: list[bytes] | None, *, mask: int
) -> None:
    if sample.rollout_log_probs is None or sample.loss_mask is None:
        raise RolloutError(
            "an observation comes after a turn", where=f"row {sample.row_id}", expected="generate_turn first"
        )
    sample.tokens = [*sample.tokens, *tokens]
    sample.rollout_log_probs = [*sample.rollout_log_probs, *log_probs]
    sample.loss_mask = [*sample.loss_mask, *[mask] * len(tokens)]
    before = sample.rollout_kept_tokens
    sample.rollout_kept_tokens = None if before is None or kept is None else [*before, *kept]
    sample.response += text
    sample.response_length += len(tokens)
