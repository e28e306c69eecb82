"""Loss masks of conversations (slime's ``MultiTurnLossMaskGenerator``), by ``buffer_rl.rollout.sft``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from buffer_rl.records.groups import GroupUid, Sample
from buffer_rl.rollout.prompts import PromptEncoder
from buffer_rl.rollout.sft import encode_conversation


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Of each mask the tokens from the first 1 on; 0 where there is none."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Token ids and loss masks of conversations. tokenizer_type: a ``--loss-mask-type``.

    Unlike slime's, whose masks count tokens of messages rendered apart, white space behind an answer's end token is not
    trained on (``docs/rollouts.md``)."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self._prompts = PromptEncoder(tokenizer)

    def get_loss_mask(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
        """``[num_tokens]`` token ids, and 1 for each that is trained on. Raises DataError for a conversation whose
        answers cannot be found."""
        prompt = [dict(message) for message in messages]
        where = GroupUid("conversation", 0, 0)  # for messages: the caller alone knows which row it is
        sample = Sample(uid=where, prompt=prompt, metadata={"tools": tools} if tools else {})
        return encode_conversation(self._prompts, sample, self.tokenizer_type)

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """See the function of this name."""
        return get_response_lengths(loss_masks)
