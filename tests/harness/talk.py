"""Conversations with a scripted model, in token ids that can be read: that of a byte is its value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from buffer_rl.agents.conversation import Conversation, NextPrompt
from buffer_rl.agents.messages import Message
from buffer_rl.agents.rendering import Renderer
from buffer_rl.agents.turns import Row, Turn, rows, turn_digest
from buffer_rl.records.ids import VersionSpan
from harness.chat_tokenizer import byte_tokenizer

OK = 256  # the one word that the tokenizer writes as one token: "ok"
SPECIAL = {"<s>": 257, "<e>": 258, "<u>": 259, "<o>": 260, "<a>": 261}
"""Start and end of a message; in ``MARKS`` those of the user, of a tool and of the assistant."""
_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_HEAD = "{% if brief %}brief {% endif %}{% for t in tools or [] %}<s>tool {{ t.function.name }}<e>\n{% endfor %}"
APPENDS = (
    f"{_HEAD}{{% for m in messages %}}<s>{{{{ m.role }}}}\n{{{{ m.content }}}}{_CALLS}<e>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""Writes each message behind the others."""
STRIPS = (
    f"{_HEAD}{{% set ns = namespace(last=-1) %}}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% set thought = m.reasoning_content %}"
    "{% if thought %}{% set text = '<think>\n' + thought + '\n</think>\n\n' + text %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    f"<s>{{{{ m.role }}}}\n{{{{ text }}}}{_CALLS}<e>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""Leaves out the reasoning of answers before the last user message."""
OPENS = STRIPS.replace("<s>assistant\n{% endif %}", "<s>assistant\n<think>\n{% endif %}")
"""The same; the prompt begins the reasoning."""
MARKS = (
    "{% for m in messages %}{{ {'user': '<u>', 'tool': '<o>', 'assistant': '<a>'}[m.role] }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
"""No mark ends a message: that of the next role does."""
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def ids(text: str) -> list[int]:
    """The ids of a text, each byte by itself, special tokens as one."""
    pieces = re.split(f"({'|'.join(SPECIAL)})", text)
    return [each for piece in pieces for each in ([SPECIAL[piece]] if piece in SPECIAL else piece.encode())]


def user(text: str) -> Message:
    """A message of the user's."""
    return {"role": "user", "content": text}


def tool(text: str, **more: Any) -> Message:
    """The answer of a tool."""
    return {"role": "tool", "content": text, **more}


class Talk:
    """One session: requests, answers that are given as ids or as text, and the rows of all its turns."""

    def __init__(self, template: str, history: Any = "template", **options: Any) -> None:
        self.tokenizer = byte_tokenizer(template, [*SPECIAL], ["ok"])
        self.conversation = Conversation(Renderer(self.tokenizer), history=history, **options)
        self.prompts: list[NextPrompt] = []
        self.turns: list[Turn] = []

    def ask(
        self,
        messages: Sequence[Message],
        answer: str | Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        finish_reason: str = "stop",
        matched: int | str | None = None,
        version: int = 0,
        **template_kwargs: Any,
    ) -> Message:
        """The message that the model answers with. answer: what it samples, with the token that ends it."""
        prompt = self.conversation.prompt(messages, tools, template_kwargs)
        output = ids(answer) if isinstance(answer, str) else list(answer)
        turn = Turn(
            prompt_ids=prompt.ids,
            output_ids=tuple(output),
            log_probs=tuple(-1.0 - (len(self.turns) + number) % 7 for number in range(len(output))),
            spans=(VersionSpan(version, 0, len(output)),) if output else (),
            finish_reason=finish_reason,
            matched=matched,
            digest=turn_digest(prompt.ids, {}),
            ordinal=sum(other.prompt_ids == prompt.ids for other in self.turns),
        )
        self.prompts.append(prompt)
        self.turns.append(turn)
        return self.conversation.record(prompt, turn).message

    @property
    def rows(self) -> list[Row]:
        """The rows of the turns so far."""
        return rows(self.turns)

    @property
    def causes(self) -> list[str]:
        """Of the prompts so far."""
        return [str(prompt.cause) for prompt in self.prompts]

    def trained(self) -> list[list[int]]:
        """For each row the pieces of its tokens that are trained on, put together."""
        masked = [(row.tokens[-row.response_length :], row.loss_mask) for row in self.rows]
        return [[token for token, mask in zip(*each, strict=True) if mask] for each in masked]
