"""The token ids of the next prompt of a conversation, so that what was sampled is sent as it was sampled.

A request of an agent has messages; engine and trainer have token ids. The deepest recorded turn whose messages begin
the request is looked for. Then the history is rendered with each recorded answer as the raw text that was sampled. If
the result begins with the text of that turn's ids, these ids stay, and only what follows is encoded. Otherwise the
template writes the history in another way, such as without its reasoning, and its own rendering is sent. No model
family is known here: a model that needs one has a plugin.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal

from buffer_rl.agents.messages import (
    Answer,
    AnswerReader,
    Message,
    calls_of,
    message_key,
    opened_reasoning,
    read_answer,
    reasoning_of,
    same_reasoning,
)
from buffer_rl.agents.rendering import Renderer, Tools, Variables, check_messages
from buffer_rl.agents.turns import Turn
from buffer_rl.errors import RolloutError


class Cause(StrEnum):
    """Why a prompt has the ids that it has."""

    NEW = "new"  # no answer precedes it
    EXTENDS = "extends"  # the ids of the last recorded turn, and what follows it
    CHANGED = "changed"  # an answer, or a message, tool or template argument before it, is not as recorded
    TEMPLATE = "template"  # the template writes the recorded answers in another way, or refuses their raw text
    OTHER_END = "other_end"  # the template goes on with another mark than the token that ended the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPrompt:
    """The ids to send for one request, ``[prompt_length]``, and why.

    num_held: how many of the ids, from the first one on, are those of a recorded turn. text: of the ids, as rendered.
    The other fields are for ``Conversation.record``.
    """

    ids: tuple[int, ...]
    cause: Cause
    num_held: int
    text: str
    chain: str
    sent: tuple[Message, ...]
    plain: tuple[Message, ...]
    tools: Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A recorded turn. ids: prompt and answer, ``[num_tokens]``; text: of these; end: the text of the token that ended
    the answer, empty if none did. sent: its messages as they were rendered, the answer as raw text; plain: the same,
    each answer as it was read."""

    ids: tuple[int, ...]
    text: str
    end: str
    sent: tuple[Message, ...]
    plain: tuple[Message, ...]
    message: Message
    order: tuple[int, str, int]


class Conversation:
    """The recorded chat turns of one session: branches, and conversations with other prompts, included.

    tokenizer: of transformers, with a chat template, else ConfigError; or a ``Renderer`` of it, which takes a
    millisecond to make and may be shared. history: what the next prompt keeps of earlier answers: what the template
    shows of them, or all of them, with their reasoning. template_kwargs: for the template. read: reads the message that
    an answer is.

    Example:
        talk = Conversation(tokenizer)
        prompt = talk.prompt([{"role": "user", "content": "2 + 3 ="}])
        turn = Turn(prompt_ids=prompt.ids, ...)  # what an engine sampled behind these ids
        message = talk.record(prompt, turn).message
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        history: Literal["template", "append"] = "template",
        template_kwargs: Mapping[str, Any] | None = None,
        read: AnswerReader = read_answer,
    ) -> None:
        self._renderer = tokenizer if isinstance(tokenizer, Renderer) else Renderer(tokenizer)
        self._template_kwargs = dict(template_kwargs or {})
        self._appends = history == "append"
        self._read = read
        self._held: dict[str, list[_Held]] = {}

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> NextPrompt:
        """The ids to send for a request, in OpenAI's form. Nothing is recorded.

        template_kwargs: of this request, in addition to those of the conversation.
        Raises DataError, with the status 400, if there are no messages, if one is none, or if the template or the
        tokenizer refuses them.
        """
        check_messages(messages)
        given = {**self._template_kwargs, **(template_kwargs or {}), "tools": list(tools)}
        variables = self._renderer.quoted(given)
        chain = _chain(messages, given)
        answers = [n for n in range(len(messages), 0, -1) if messages[n - 1]["role"] == "assistant"]
        found = [(n, held) for n in answers for held in self._recorded(chain[n - 1], messages[n - 1])]
        depth, last = found[0] if found else (0, None)
        later = enumerate(messages[depth:], start=depth)
        rest = [self._renderer.message(message, is_first=number == 0) for number, message in later]
        plain, held = (*(last.plain if last else ()), *rest), last
        text, cause = self._going_on(last, rest, variables) if last else ("", Cause.NEW)
        if text and last:
            sent = (*last.sent, *rest)
        else:
            text, sent = self._renderer.render(plain, variables), plain
            held = next((each for _, each in found if text.startswith(each.text)), None)
        if answers and depth < answers[0]:
            cause = Cause.CHANGED
        elif held and held is last:
            cause = Cause.EXTENDS
        ids = held.ids if held else ()
        behind = self._renderer.encode(text[len(held.text) if held else 0 :], behind=bool(ids))
        return NextPrompt(
            ids=(*ids, *behind),
            cause=cause,
            num_held=len(ids),
            text=text,
            chain=chain[-1],
            sent=sent,
            plain=plain,
            tools=given["tools"],
        )

    def record(self, prompt: NextPrompt, turn: Turn) -> Answer:
        """The answer of a turn that ``prompt`` was sent for; later prompts may extend it.

        Raises RolloutError if the turn has another prompt.
        """
        if turn.prompt_ids != prompt.ids:
            raise RolloutError("the turn has another prompt", where=f"turn {turn.digest[:12]}/{turn.ordinal}")
        raw = self._renderer.text_behind(prompt.ids, turn.output_ids)
        end = self._end(turn, raw)
        said = raw[: len(raw) - len(end)]
        shown = said.partition(turn.matched)[0] if isinstance(turn.matched, str) and turn.matched else said
        answer = self._read(shown, prompt.text, prompt.tools, turn.finish_reason, f"{turn.digest}/{turn.ordinal}")
        held = _Held(
            ids=(*prompt.ids, *turn.output_ids),
            text=prompt.text + raw,
            end=end,
            sent=(*prompt.sent, {"role": "assistant", "content": opened_reasoning(prompt.text) + said}),
            plain=(*prompt.plain, self._renderer.message(answer.message)),
            message=answer.message,
            order=turn.order,
        )
        self._held.setdefault(_link(prompt.chain, answer.message), []).append(held)
        return answer

    def _recorded(self, link: str, given: Mapping[str, Any]) -> list[_Held]:
        """The turns with these messages, the likeliest first: equal ids of calls, equal reasoning, the order of turns.

        A client that drops reasoning does not say which of several answers with one text it means."""
        equal = [held for held in self._held.get(link, ()) if same_reasoning(held.message, given)]
        if len(equal) < 2:
            return equal
        ids, is_plain = [each for each, _ in calls_of(given)], reasoning_of(given) == ""

        def unlikeliness(held: _Held) -> tuple[bool, bool, tuple[int, str, int]]:
            others = [each for each, _ in calls_of(held.message)] != ids
            return others, is_plain and reasoning_of(held.message) != "", held.order

        return sorted(equal, key=unlikeliness)

    def _going_on(self, last: _Held, rest: Sequence[Message], variables: Variables) -> tuple[str, Cause]:
        """The text of the next prompt if it begins with that of ``last``, else an empty one; and the cause."""
        text = self._renderer.renders([*last.sent, *rest], variables) or ""
        if text.startswith(last.text):
            return text, Cause.EXTENDS
        unended = last.text.removesuffix(last.end)
        behind = text.removeprefix(unended) if text.startswith(unended) else None
        if self._appends:
            behind = self._behind(last, rest, variables)
            if behind is not None and behind.startswith(last.end):
                return last.text + behind.removeprefix(last.end), Cause.EXTENDS
        is_other = last.end and behind and self._renderer.begins_special(behind)
        return "", Cause.OTHER_END if is_other else Cause.TEMPLATE

    def _behind(self, last: _Held, rest: Sequence[Message], variables: Variables) -> str | None:
        """What the template writes behind the answer of ``last``, whatever it makes of the answer; None if unknown."""
        marker = f"ANSWER{hashlib.sha256(last.text.encode(errors='replace')).hexdigest()[:20]}"
        marked = [*last.plain[:-1], {"role": "assistant", "content": marker}, *rest]
        _, *behind = (self._renderer.renders(marked, variables) or "").split(marker)
        return behind[0] if len(behind) == 1 else None

    def _end(self, turn: Turn, raw: str) -> str:
        """The text of the token that ended the answer; empty if it was cut, or ended by a stop string."""
        if turn.finish_reason != "stop" or not turn.output_ids:
            return ""
        last = turn.output_ids[-1]
        if turn.matched != last and not (turn.matched is None and self._renderer.is_special(last)):
            return ""
        before = self._renderer.text_behind(turn.prompt_ids, turn.output_ids[:-1])
        return raw[len(before) :] if raw.startswith(before) else ""


def _chain(messages: Sequence[Mapping[str, Any]], variables: Variables) -> list[str]:
    """For each message a digest of tools and template arguments, and of all messages up to it."""
    first = hashlib.sha256(json.dumps(variables, sort_keys=True, default=str).encode()).hexdigest()
    return list(accumulate(messages, _link, initial=first))[1:]


def _link(before: str, message: Mapping[str, Any]) -> str:
    return hashlib.sha256((before + message_key(message)).encode()).hexdigest()
