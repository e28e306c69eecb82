"""Supervised fine-tuning as a rollout function: the answers are those of the data, without an engine.

Conversations become token ids, with a loss mask of 1 on what the assistant says. The tokens are those of the
conversation's text, encoded once. A token is trained on if a character of it belongs to an answer: the content and the
end token of an assistant's message, not the header before it and not the white space after the end token, which a
model neither generates. ``--loss-mask-type`` says how answers are found in the text. A message with ``"loss": false``
(slime: ``"step_loss_mask": 0``) is context alone; the template does not see this key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from buffer_rl.args import Args
from buffer_rl.errors import DataError, RolloutError
from buffer_rl.kinds.rollout import RolloutBuffer
from buffer_rl.records.groups import RolloutOutput, Sample, SampleGroup, Status
from buffer_rl.rollout.context import RolloutContext, current_context
from buffer_rl.rollout.evaluate import evaluate
from buffer_rl.rollout.failure_policy import FailurePolicy
from buffer_rl.rollout.failures import AttemptFailure
from buffer_rl.rollout.production import run_all, within_deadline
from buffer_rl.rollout.prompts import TOO_LONG, PromptEncoder, data_errors
from buffer_rl.rollout.stats import RolloutStats

SWITCHES = ("loss", "step_loss_mask")
ANY_QUESTION = {"role": "user", "content": "?"}  # what a message rendered by itself follows
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = Mapping[str, Any]
Spans = dict[int, tuple[int, int]]
"""Where answers are in a text: first character and end, by the number of the message."""


class SFTRollout:
    """Turns rows into training rows. Use it with ``--loss-type sft_loss``.

    A row with a label: tokens = prompt + label + end token, where prompt and label are encoded separately; the loss
    mask is 1 on the label and the end token. A row without one, whose prompt is a conversation: its tokens, with a
    loss mask of 1 on the assistant's; the response begins with the first of them. The reward is 0.
    An evaluation generates with the engine, as usual.
    """

    uses_engine = False
    concurrent = True

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
        await within_deadline(work, args, buffer, stats)
        names = {"response_len/mean", "response_len/max", "data_failures", "drop_quarantined"}
        return RolloutOutput(metrics={name: value for name, value in stats.metrics().items() if name in names})


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
        what = f"prompt and answer have {len(tokens)} tokens"
        raise DataError(what, where=f"row {sample.row_id}", expected=f"at most --rollout-max-context-len {longest}")
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
        expected = "the answer as text that is not empty; or no label, and the answers among the prompt's messages"
        raise DataError(f"the label is {sample.label!r}", where=f"row {sample.row_id}", expected=expected)
    end_token = prompts.tokenizer.eos_token_id
    if end_token is None:
        raise RolloutError("the tokenizer has no end token", where="--hf-checkpoint", expected="eos_token in it")
    return [*prompts.encode_text(sample.label, where=f"row {sample.row_id}"), end_token]


async def _produce_all(context: RolloutContext, buffer: RolloutBuffer, stats: RolloutStats) -> None:
    failures = FailurePolicy(context, buffer, stats)

    async def lease(num_groups: int) -> list[SampleGroup]:
        hint = "nearly every prompt is longer than --rollout-max-prompt-len"
        stats.require_few_drops(context.args, buffer.ticket.task, hint)
        groups = await buffer.aget_samples(num_groups)
        if not groups:
            raise RolloutError("the buffer gave no groups", where=buffer.ticket.task)
        return groups

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
            (group,) = await lease(1)
        await buffer.afinish(group)
        failures.succeeded(group)
        stats.count_kept(group, [0.0] * len(group))

    await run_all(produce_one(group) for group in await lease(buffer.ticket.num_groups))


def is_conversation(sample: Sample) -> bool:
    """Whether the answers are in the sample's prompt: chat messages without a label."""
    return sample.label is None and isinstance(sample.prompt, list)


def encode_conversation(prompts: PromptEncoder, sample: Sample, mask_type: str) -> tuple[list[int], list[int]]:
    """Token ids and loss mask, ``[num_tokens]`` each, of the conversation that is the sample's prompt.

    The first token is never trained on: there is none to predict it from. Raises DataError, naming the row, if nothing
    is trained on or if the chat template does not show where the answers are; RolloutError for a tokenizer without
    character offsets.
    """
    where = f"row {sample.row_id}"
    assert isinstance(sample.prompt, list)
    trained = [number for number, message in enumerate(sample.prompt) if _is_trained(message, number, where)]
    if not trained:
        expected = "a message of the role 'assistant' without \"loss\": false, or a label"
        raise DataError("there is no answer to train on", where=where, expected=expected)
    messages = [{key: value for key, value in m.items() if key not in SWITCHES} for m in sample.prompt]
    conversation = _Conversation(prompts, messages, trained, sample.metadata.get("tools"), where)
    if not getattr(prompts.tokenizer, "is_fast", False):
        raise RolloutError(
            "the tokenizer does not say which characters a token stands for, so the answers cannot be found",
            where="--hf-checkpoint",
            expected="a fast tokenizer (tokenizer.json), or rows of a prompt and a label",
        )
    if mask_type == "auto" and conversation.has_marks():
        tokens, mask = conversation.by_marks()
    else:
        tokens, mask = conversation.encode(*_FINDERS[mask_type](conversation))
    mask = [0, *mask[1:]]
    if 1 not in mask:
        raise DataError("the answers have no tokens", where=where, expected="at least one token to train on")
    return tokens, mask


def _is_trained(message: Message, number: int, where: str) -> bool:
    """Whether it is an answer that no switch turns off. A switch of null is absent: tables fill their columns so."""
    for switch in SWITCHES:
        if message.get(switch) not in (None, 0, 1):
            what = f"{switch!r} of message {number} is {message[switch]!r}"
            raise DataError(what, where=where, expected="true, false, 1 or 0")
    return message["role"] == "assistant" and all(message.get(switch) in (None, 1) for switch in SWITCHES)


@dataclass(frozen=True, slots=True)
class _Conversation:
    """One row. trained: numbers of the messages that are trained on."""

    prompts: PromptEncoder
    messages: Sequence[Message]
    trained: Sequence[int]
    tools: Any
    where: str

    def render(self, messages: Sequence[Message], *, answering: bool = False) -> str:
        """The text of ``messages``; answering: and of the header before the assistant's answer."""
        return str(self.prompts.render(messages, self.tools, where=self.where, add_generation_prompt=answering))

    def encode(self, text: str, spans: Spans) -> tuple[list[int], list[int]]:
        """Token ids, and 1 for each that has a character in a span."""
        with data_errors("the tokenizer cannot encode the conversation", self.where):
            encoded = self.prompts.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        inside = [0] * len(text)
        for start, end in spans.values():
            inside[start:end] = [1] * (end - start)
        mask = [int(1 in inside[start:end]) for start, end in encoded["offset_mapping"]]
        return list(encoded["input_ids"]), mask

    def has_marks(self) -> bool:
        """Whether the template itself marks what the assistant generates."""
        tokenizer = self.prompts.tokenizer
        if not tokenizer.chat_template:
            return False  # ``render`` says so
        return _MARKS.search(tokenizer.get_chat_template(tools=self.tools or None)) is not None

    def by_marks(self) -> tuple[list[int], list[int]]:
        """Token ids and mask as the template's marks say, without the answers that are switched off."""
        encoded = self.prompts.render(
            self.messages,
            self.tools,
            where=self.where,
            add_generation_prompt=False,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        mask = list(encoded["assistant_masks"])
        answers = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(self.trained) < len(answers):
            runs = [(bool(marked), len(list(run))) for marked, run in groupby(mask)]
            if sum(marked for marked, _ in runs) != len(answers):
                raise DataError(
                    f"the chat template marks {sum(marked for marked, _ in runs)} pieces of text, and there are "
                    f"{len(answers)} answers: which piece is switched off is not known",
                    where=self.where,
                    expected="one {% generation %} block for each answer",
                    hint="--loss-mask-type qwen does not use the marks",
                )
            left, mask = iter(answers), []
            for marked, length in runs:
                mask += [int(marked and next(left) in self.trained)] * length
        return list(encoded["input_ids"]), mask

    def by_prefixes(self) -> tuple[str, Spans]:
        """An answer is what its message appends to the text, header included, that the model would answer."""
        text, spans = self.render(self.messages), {}
        for number in self.trained:
            header = self.render(self.before(number), answering=True)
            answered = self.render(self.messages[: number + 1])
            if not answered.startswith(header):
                raise self.unstable(f"begins message {number} otherwise than it asks for an answer")
            if not text.startswith(answered):
                raise self.unstable(f"renders message {number} otherwise once others follow it")
            spans[number] = (len(header), self.end_of(answered))
        return text, spans

    def one_by_one(self) -> tuple[str, Spans]:
        """Messages from the first answer on are rendered as if they followed a question of the user's: each answer by
        itself, and what is between two answers together."""
        answers = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        text, spans = self.render(self.before(answers[0])), {}
        question, header = self.render([ANY_QUESTION]), self.render([ANY_QUESTION], answering=True)
        numbers = range(answers[0], len(self.messages))
        for answer, run in groupby(numbers, key=lambda number: number if number in answers else -1):
            piece = self.render([ANY_QUESTION, *(self.messages[number] for number in run)])
            if not piece.startswith(question if answer < 0 else header) or not header.startswith(question):
                raise self.unstable("renders a question otherwise once other messages follow it")
            if answer in self.trained:
                offset = len(text) - len(question)
                spans[answer] = (offset + len(header), offset + self.end_of(piece))
            text += piece[len(question) :]
        return text, spans

    def last_answer(self) -> tuple[str, Spans]:
        """The text up to the last message's header by the template, then the last message as it is and the end
        token: for templates that leave out a part of the answers, such as their thinking."""
        number, end_token = len(self.messages) - 1, self.prompts.tokenizer.eos_token
        content = self.messages[number].get("content")
        if number not in self.trained or not isinstance(content, str) or end_token is None:
            expected = 'an assistant\'s message of text, without "loss": false, and a tokenizer with an end token'
            hint = "--loss-mask-type distill_qwen trains on the last message alone"
            raise DataError("the last message is no answer to train on", where=self.where, expected=expected, hint=hint)
        header = self.render(self.before(number), answering=True)
        text = header + content + end_token
        return text, {number: (len(header), len(text))}

    def before(self, number: int) -> Sequence[Message]:
        """The messages before an answer. Raises DataError if there are none: templates render no empty list."""
        if number == 0:
            what = "the conversation begins with an answer, whose header cannot be distinguished from its content"
            expected = "a message of the user or the system first, or a chat template with {% generation %} marks"
            raise DataError(what, where=self.where, expected=expected)
        return self.messages[:number]

    def end_of(self, text: str) -> int:
        """The end of the answer that ``text`` ends with, without white space after an end token."""
        tokenizer = self.prompts.tokenizer
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        shorter = text.rstrip()
        return len(shorter) if shorter.endswith(tuple(special)) else len(text)

    def unstable(self, what: str) -> DataError:
        """The error of a template whose text for a part of the conversation is no part of the whole text."""
        return DataError(
            f"the chat template {what}, so which tokens are the answer is not known",
            where=self.where,
            expected="a template that appends to the text of the messages before",
            hint="some leave the thinking out of earlier answers: --loss-mask-type qwen3 keeps it, distill_qwen trains "
            "on the last answer alone; or mark the answers in the template with {% generation %}",
        )


_FINDERS: Mapping[str, Callable[[_Conversation], tuple[str, Spans]]] = {
    "auto": _Conversation.by_prefixes,
    "qwen": _Conversation.by_prefixes,
    "qwen3": _Conversation.one_by_one,
    "distill_qwen": _Conversation.last_answer,
}
