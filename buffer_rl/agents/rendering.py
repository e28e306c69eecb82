"""From messages to text and token ids, and from token ids to text, with the tokenizer and its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from buffer_rl.agents.messages import Message, calls_of, text_of
from buffer_rl.errors import ConfigError, DataError

_SEAM = "\ufdd0"
"""Stands inside a special token that a user typed: no token reaches across it. A noncharacter of Unicode."""
_PROBE = "LATESYSTEMMESSAGE"
_OVERLAP = 4  # ids before a text that show the tokenizer its neighbours
Tools = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]
"""``tools`` and the template's other arguments."""


class Renderer:
    """One tokenizer and its chat template.

    Texts of this class may contain seams: ``encode`` encodes each side of one by itself. They break the special tokens
    that users, tools and system prompts typed, so that these stay text.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Raises ConfigError if the tokenizer has no chat template."""
        if not getattr(tokenizer, "chat_template", None):
            what, expected = "the tokenizer has no chat template", "a folder with chat_template.jinja"
            raise ConfigError(what, where="--hf-checkpoint", expected=expected)
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {str(token) for token in added.values() if token.special} | {*tokenizer.all_special_tokens}
        self._special_ids = {number for number, token in added.items() if token.special} | {*tokenizer.all_special_ids}
        longest_first = sorted((token for token in special if len(token) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._joins = self._decode([*self._encode("a"), *self._encode("b")]) == "ab"

    def message(self, message: Mapping[str, Any], *, is_first: bool = False) -> Message:
        """A message as templates want it: without keys of None, the content a text if all of it is text, arguments of
        calls objects, and with seams in the special tokens of all but answers. is_first: of its conversation; another
        system message is a user's if the template would refuse it or leave it out."""
        shown = {key: value for key, value in message.items() if value is not None}
        parts = shown.get("content", "")
        if not isinstance(parts, list) or all(isinstance(p, Mapping) and p.get("type") == "text" for p in parts):
            shown["content"] = text_of(shown)
        calls = [{**({"id": i} if i else {}), "type": "function", "function": call} for i, call in calls_of(shown)]
        shown.pop("tool_calls", None)
        if calls:
            shown["tool_calls"] = calls
        if shown["role"] == "developer" and "developer" not in str(self._tokenizer.chat_template):
            shown["role"] = "system"  # many templates leave out messages of a role that they do not know
        if shown["role"] in ("system", "developer") and not is_first and not self._shows_late_system:
            shown["role"] = "user"
        return shown if shown["role"] == "assistant" else self.quoted(shown)

    def quoted(self, value: Any) -> Any:
        """The value with a seam in each special token of its texts, keys of objects apart."""
        if isinstance(value, str):
            return self._special.sub(lambda found: f"{found[0][0]}{_SEAM}{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {key: self.quoted(each) for key, each in value.items()}
        return [self.quoted(each) for each in value] if isinstance(value, list | tuple) else value

    def render(self, messages: Sequence[Message], variables: Variables) -> str:
        """The text of messages (of ``message``) and variables (of ``quoted``), and of the head of the answer to come.

        Some templates want the arguments of calls as objects, some as texts: both are tried. Raises DataError, with
        the status 400, that names the first message that the template refuses.
        """
        try:
            return self._rendered(messages, variables)
        except Exception as error:  # fault boundary: a template is a program of the model's folder
            what = f"the chat template refuses the request: {type(error).__name__}: {error}"
            expected = "roles, an order of them, and tools, that the template accepts"
            raise _error(what, expected, self._refused(messages, variables)) from error

    def renders(self, messages: Sequence[Message], variables: Variables) -> str | None:
        """The same; None if the template refuses the messages."""
        try:
            return self._rendered(messages, variables)
        except Exception:  # fault boundary, as above
            return None

    def encode(self, text: str, *, behind: bool = False) -> list[int]:
        """Token ids of a rendered text. behind: it follows other ids, so it begins no text. Raises DataError if the
        tokenizer cannot encode it."""
        ids: list[int] = []
        try:
            for piece in filter(None, text.split(_SEAM)):
                ids += self._encode_behind(piece) if behind or ids else self._encode(piece)
        except BaseException as error:  # a panic of the Rust library is no ``Exception``
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise _error(f"the tokenizer cannot encode the text: {error}", "text") from error
        return ids

    def text_behind(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> str:
        """The text of ``output_ids``, special tokens included, behind ``prompt_ids``; bytes that are no UTF-8 are shown
        as U+FFFD."""
        before = prompt_ids[-_OVERLAP:]
        head, whole = self._decode(before), self._decode([*before, *output_ids])
        return whole[len(head) :] if whole.startswith(head) else self._decode(output_ids)

    def is_special(self, token: int) -> bool:
        """Whether it is the id of a special token."""
        return token in self._special_ids

    def begins_special(self, text: str) -> bool:
        """Whether a rendered text begins with a special token."""
        return self._special.match(text) is not None

    @cached_property
    def _shows_late_system(self) -> bool:
        texts = ("system", "a"), ("user", "b"), ("system", _PROBE), ("user", "c")
        messages = [{"role": role, "content": text} for role, text in texts]
        return _PROBE in (self.renders(messages, {}) or "")

    def _rendered(self, messages: Sequence[Message], variables: Variables) -> str:
        asked = {**variables, "tools": variables.get("tools") or None, "tokenize": False, "add_generation_prompt": True}
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), **asked))
        except Exception:  # fault boundary, as above
            if not any("tool_calls" in message for message in messages):
                raise
        return str(self._tokenizer.apply_chat_template([_with_text_arguments(m) for m in messages], **asked))

    def _refused(self, messages: Sequence[Message], variables: Variables) -> str:
        """The first message that the template refuses, or the tools."""
        lengths = range(1, len(messages))
        number = next((n for n in lengths if self.renders(messages[:n], variables) is None), len(messages)) - 1
        without = {**variables, "tools": []}
        if number == 0 and variables.get("tools") and self.renders(messages[:1], without) is not None:
            return "the tools of the request"
        return f"message {number} ({messages[number]['role']})"

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_behind(self, text: str) -> list[int]:
        """Some tokenizers write a space before each text that they encode: it is encoded behind a line break, if so."""
        if not self._joins:
            head, whole = self._encode("\n"), self._encode("\n" + text)
            if whole[: len(head)] == head:
                return whole[len(head) :]
        return self._encode(text)

    def _decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises DataError, with the status 400, if there are no messages, or if one is none."""
    if not messages:
        raise _error("the request has no messages", "at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _error(f"it is {message!r:.80}", 'an object with a text under "role"', f"message {number}")


def _error(what: str, expected: str, where: str = "") -> DataError:
    return DataError(what, where=where, expected=expected, status=400)


def _with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": written}})
    return {**message, "tool_calls": calls} if calls else message
