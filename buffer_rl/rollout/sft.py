"""Supervised fine-tuning as a rollout function: the answers are those of the data, without an engine."""

from __future__ import annotations

from typing import Any

from buffer_rl.contracts import RolloutBuffer
from buffer_rl.errors import DataError, RolloutError
from buffer_rl.rollout.context import RolloutContext, current_context
from buffer_rl.rollout.evaluate import evaluate
from buffer_rl.rollout.loss_masks import encode_conversation, is_conversation
from buffer_rl.rollout.production import run_all, within_deadline
from buffer_rl.rollout.prompts import TOO_LONG
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.types import RolloutOutput, Sample, SampleGroup, Status


class SFTRollout:
    """Turns rows into training rows. Use it with ``--loss-type sft_loss``.

    A row with a label: tokens = prompt + label + end token, where prompt and label are encoded separately; the loss
    mask is 1 on the label and the end token. A row without one, whose prompt is a conversation: its tokens, with a
    loss mask of 1 on the assistant's (``buffer_rl.rollout.loss_masks``); the response begins with the first of them.
    The reward is 0. An evaluation generates with the engine, as usual.
    """

    uses_engine = False

    def __init__(self, args: Any) -> None:
        self._args = args

    async def __call__(
        self, args: Any, rollout_id: int, buffer: RolloutBuffer, evaluation: bool = False
    ) -> RolloutOutput:
        """Report every group through ``buffer``. Raises DataError, naming the row, for one without an answer."""
        context = current_context()
        if evaluation:
            return await evaluate(context, buffer)
        stats = RolloutStats()
        work = _produce_all(context, buffer, stats)
        await within_deadline(work, args.rollout_timeout_s, buffer.ticket, stats)
        lengths = stats.response_lengths
        return RolloutOutput(
            metrics={
                "response_len/mean": sum(lengths) / len(lengths),
                "response_len/max": float(max(lengths)),
            }
        )


def fill(context: RolloutContext, sample: Sample) -> bool:
    """Make a training row of the sample, as described at ``SFTRollout``; False, with nothing changed, where it has more
    than ``--rollout-max-prompt-len`` tokens before the first that is trained on."""
    limit = context.args.rollout_max_prompt_len
    if is_conversation(sample):
        tokens, mask = encode_conversation(context.prompts, sample, context.args.loss_mask_type)
        start = mask.index(1)
        if limit is not None and start > limit:
            return False
        response = context.tokenizer.decode(tokens[start:])
    else:
        if context.prompts.too_long(sample, limit):
            return False
        prompt_ids, answer_ids = context.prompts.encode(sample), _answer(context, sample)
        tokens, start, response = prompt_ids + answer_ids, len(prompt_ids), sample.label
        mask = [0] * start + [1] * len(answer_ids)
    longest = context.args.rollout_max_context_len
    if longest is not None and len(tokens) > longest:
        raise DataError(
            f"prompt and answer have {len(tokens)} tokens",
            where=f"row {sample.row_id}",
            expected=f"at most --rollout-max-context-len {longest}",
        )
    sample.tokens = tokens
    sample.response = response
    sample.response_length = len(tokens) - start
    sample.loss_mask = mask[start:]
    sample.rollout_log_probs = None
    sample.weight_versions = []
    sample.reward = 0.0
    sample.status = Status.COMPLETED
    return True


def _answer(context: RolloutContext, sample: Sample) -> list[int]:
    """The label and the end token."""
    if not isinstance(sample.label, str) or not sample.label:
        raise DataError(
            f"the label is {sample.label!r}",
            where=f"row {sample.row_id}",
            expected="the answer as text that is not empty, in the field that --label-key names; or a prompt of chat "
            "messages that holds the answers, and no label",
        )
    end_token = context.tokenizer.eos_token_id
    if end_token is None:
        raise RolloutError("the tokenizer has no end token", where="--hf-checkpoint", expected="eos_token in it")
    return [*context.prompts.encode_text(sample.label), end_token]


async def _produce_all(context: RolloutContext, buffer: RolloutBuffer, stats: RolloutStats) -> None:
    async def produce_one(group: SampleGroup) -> None:
        while not all(fill(context, sample) for sample in group):
            await buffer.areject(group, TOO_LONG)
            stats.drops[TOO_LONG] += 1
            (group,) = await _lease(context, buffer, stats, 1)
        await buffer.afinish(group)
        stats.count_kept(group, [0.0] * len(group))

    groups = await _lease(context, buffer, stats, buffer.ticket.num_groups)
    await run_all(produce_one(group) for group in groups)


async def _lease(
    context: RolloutContext, buffer: RolloutBuffer, stats: RolloutStats, num_groups: int
) -> list[SampleGroup]:
    limit = context.args.dynamic_sampling_max_drops * context.args.rollout_batch_size
    if stats.drops.total() > limit:
        raise RolloutError(
            stats.drops_text(),
            where=buffer.ticket.task,
            expected=f"at most {limit} drops (--dynamic-sampling-max-drops for each wanted group)",
            hint="nearly every prompt is longer than --rollout-max-prompt-len",
        )
    groups = await buffer.aget_samples(num_groups)
    if not groups:
        raise RolloutError("the buffer gave no groups", where=buffer.ticket.task)
    return groups
