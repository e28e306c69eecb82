"""Supervised fine-tuning as a rollout function: the answers are those of the data, without an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from buffer_rl.errors import DataError, RolloutError
from buffer_rl.kinds.rollout import RolloutBuffer
from buffer_rl.records.groups import RolloutOutput, Sample, SampleGroup, Status
from buffer_rl.rollout.context import RolloutContext, current_context
from buffer_rl.rollout.evaluate import evaluate
from buffer_rl.rollout.failure_policy import FailurePolicy
from buffer_rl.rollout.failures import AttemptFailure
from buffer_rl.rollout.loss_masks import encode_conversation, is_conversation
from buffer_rl.rollout.production import run_all, within_deadline
from buffer_rl.rollout.prompts import TOO_LONG, PromptEncoder, data_errors
from buffer_rl.rollout.stats import RolloutStats

if TYPE_CHECKING:
    from buffer_rl.args import Args


class SFTRollout:
    """Turns rows into training rows. Use it with ``--loss-type sft_loss``.

    A row with a label: tokens = prompt + label + end token, where prompt and label are encoded separately; the loss
    mask is 1 on the label and the end token. A row without one, whose prompt is a conversation: its tokens, with a
    loss mask of 1 on the assistant's (``buffer_rl.rollout.loss_masks``); the response begins with the first of them.
    The reward is 0. An evaluation generates with the engine, as usual.
    """

    uses_engine = False

    def __init__(self, args: Args) -> None:
        self._args = args

    async def __call__(
        self, args: Args, rollout_id: int, buffer: RolloutBuffer, evaluation: bool = False
    ) -> RolloutOutput:
        """Report every group through ``buffer``; one of which no row can be made goes into quarantine. Raises
        RolloutError if nearly all are such groups, or too long."""
        context = current_context()
        if evaluation:
            return await evaluate(context, buffer)
        stats = RolloutStats()
        work = _produce_all(context, buffer, stats)
        await within_deadline(work, args.rollout_timeout_s, buffer.ticket, stats)
        lengths = stats.response_lengths
        counted = stats.metrics()
        names = {"data_failures", "drop_quarantined"}
        return RolloutOutput(
            metrics={
                "response_len/mean": sum(lengths) / len(lengths),
                "response_len/max": float(max(lengths)),
                **{name: value for name, value in counted.items() if name in names},
            }
        )


def fill(args: Args, prompts: PromptEncoder, sample: Sample) -> bool:
    """Make a training row of the sample, as described at ``SFTRollout``; False, with nothing changed, where it has more
    than ``--rollout-max-prompt-len`` tokens before the first that is trained on.

    Raises DataError, naming the row, if none can be made of it: it has no answer, the chat template or the tokenizer
    refuses it, or it is too long; RolloutError for a tokenizer with which none can be made at all."""
    limit = args.rollout_max_prompt_len
    if is_conversation(sample):
        tokens, mask = encode_conversation(prompts, sample, args.loss_mask_type)
        start = mask.index(1)
        if limit is not None and start > limit:
            return False
        with data_errors("the tokenizer cannot decode the answers", f"row {sample.row_id}"):
            response = prompts.tokenizer.decode(tokens[start:])
    else:
        if prompts.too_long(sample, limit):
            return False
        prompt_ids, answer_ids = prompts.encode(sample), _answer(prompts, sample)
        tokens, start, response = prompt_ids + answer_ids, len(prompt_ids), sample.label
        mask = [0] * start + [1] * len(answer_ids)
    longest = args.rollout_max_context_len
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


def _answer(prompts: PromptEncoder, sample: Sample) -> list[int]:
    """The label and the end token."""
    if not isinstance(sample.label, str) or not sample.label:
        raise DataError(
            f"the label is {sample.label!r}",
            where=f"row {sample.row_id}",
            expected="the answer as text that is not empty; or no label, and the answers among the prompt's messages",
        )
    end_token = prompts.tokenizer.eos_token_id
    if end_token is None:
        raise RolloutError("the tokenizer has no end token", where="--hf-checkpoint", expected="eos_token in it")
    return [*prompts.encode_text(sample.label, where=f"row {sample.row_id}"), end_token]


async def _produce_all(context: RolloutContext, buffer: RolloutBuffer, stats: RolloutStats) -> None:
    failures = FailurePolicy(context, buffer, stats)

    async def is_filled(group: SampleGroup) -> bool:
        """Whether the group has its rows; else it was dropped."""
        try:
            if all(fill(context.args, context.prompts, sample) for sample in group):
                return True
        except DataError as error:  # at a second attempt, too
            await failures.handle(group, replace(AttemptFailure.of_conversion(error), repeatable=False))
            return False
        await buffer.areject(group, TOO_LONG)
        stats.drops[TOO_LONG] += 1
        return False

    async def produce_one(group: SampleGroup) -> None:
        while not await is_filled(group):
            (group,) = await _lease(context, buffer, stats, 1)
        await buffer.afinish(group)
        failures.succeeded(group)
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
