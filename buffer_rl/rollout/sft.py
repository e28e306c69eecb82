"""Supervised fine-tuning as a rollout function: the response is the row's label, without an engine."""

from __future__ import annotations

from typing import Any

from buffer_rl.contracts import RolloutBuffer
from buffer_rl.errors import DataError, RolloutError
from buffer_rl.rollout.context import RolloutContext, current_context
from buffer_rl.rollout.evaluate import evaluate
from buffer_rl.rollout.production import run_all, within_deadline
from buffer_rl.rollout.prompts import TOO_LONG
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.types import RolloutOutput, Sample, SampleGroup, Status


class SFTRollout:
    """Turns prompts and labels into training rows. Use it with ``--loss-type sft_loss``.

    tokens = prompt + answer + end token, where prompt and answer are encoded separately; the loss mask is 1 on
    the answer and the end token; the reward is 0. An evaluation generates with the engine, as usual.
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
                "perf/rollout_time": stats.metrics()["perf/rollout_time"],
            }
        )


def fill_from_label(context: RolloutContext, sample: Sample) -> None:
    """Make the sample's label its response, as described at ``SFTRollout``."""
    if not isinstance(sample.label, str) or not sample.label:
        raise DataError(
            f"the label is {sample.label!r}",
            where=f"row {sample.row_id}",
            expected="the answer as text that is not empty, in the field that --label-key names",
        )
    end_token = context.tokenizer.eos_token_id
    if end_token is None:
        raise RolloutError("the tokenizer has no end token", where="--hf-checkpoint", expected="eos_token in it")
    prompt_ids = context.prompts.encode(sample)
    answer_ids = [*context.prompts.encode_text(sample.label), end_token]
    limit = context.args.rollout_max_context_len
    if limit is not None and len(prompt_ids) + len(answer_ids) > limit:
        raise DataError(
            f"prompt and answer have {len(prompt_ids) + len(answer_ids)} tokens",
            where=f"row {sample.row_id}",
            expected=f"at most --rollout-max-context-len {limit}",
        )
    sample.tokens = prompt_ids + answer_ids
    sample.response = sample.label
    sample.response_length = len(answer_ids)
    sample.loss_mask = [1] * len(answer_ids)
    sample.rollout_log_probs = None
    sample.weight_versions = []
    sample.reward = 0.0
    sample.status = Status.COMPLETED


async def _produce_all(context: RolloutContext, buffer: RolloutBuffer, stats: RolloutStats) -> None:
    async def produce_one(group: SampleGroup) -> None:
        while context.prompts.too_long(group[0], context.args.rollout_max_prompt_len):
            await buffer.areject(group, TOO_LONG)
            stats.drops[TOO_LONG] += 1
            (group,) = await _lease(context, buffer, stats, 1)
        for sample in group:
            fill_from_label(context, sample)
        await buffer.afinish(group)
        stats.count_kept(group, [0.0] * len(group))

    groups = await _lease(context, buffer, stats, buffer.ticket.num_groups)
    await run_all(produce_one(group) for group in groups)


async def _lease(
    context: RolloutContext, buffer: RolloutBuffer, stats: RolloutStats, num_groups: int
) -> list[SampleGroup]:
    limit = context.args.dynamic_sampling_max_drops * buffer.ticket.num_groups
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
