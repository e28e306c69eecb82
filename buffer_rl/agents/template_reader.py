"""Reads answers by a response template of transformers, such as that of the tokenizer, and loses nothing.

``tokenizer.parse_response`` raises for a whole answer if one call is malformed, and leaves out what no field of the
template takes. Here the answer is cut into the regions that the template's marks delimit, and each is parsed by itself.
A region that does not parse, or of which the parser would drop a part, stays in the text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from buffer_rl.agents.messages import Answer, AnswerReader, Message, answer_with, read_answer
from buffer_rl.errors import ConfigError, raised_as

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = ("tool_calls", "tool_call")
Template = Mapping[str, Any]


def reader_of(tokenizer: Any, template: Template | None) -> AnswerReader:
    """The reader by ``template`` (``--response-template``), or by that of the tokenizer; else ``read_answer``.

    Raises ConfigError if the template is none."""
    found = template or getattr(tokenizer, "response_template", None)
    return TemplateReader(found) if found else read_answer


class TemplateReader:
    """An ``AnswerReader`` by a response template, which is an object as transformers' ``parse_response`` takes it.

    Fields of these names are read: ``content``, ``reasoning_content``, ``reasoning`` and ``thinking``, ``tool_calls``
    and ``tool_call``. Others stay in the text. Raises ConfigError if the template is none."""

    def __init__(self, template: Template) -> None:
        expected = "an object as tokenizer.parse_response of transformers 5.23 takes it"
        facts = {"where": "--response-template", "expected": expected}
        # Fault boundary: the template is the user's or of the model's folder.
        with raised_as(ConfigError, "no response template can be made of it", Exception, **facts):
            from transformers.utils.chat_parsing import parse_response
            from transformers.utils.chat_parsing.response_templates import load_response_template

            spec = load_response_template(dict(template))
        fields = {name: dataclasses.replace(field, optional=True) for name, field in spec.fields.items()}
        self._spec = dataclasses.replace(spec, fields=fields)
        self._parse = parse_response

    def __call__(
        self, text: str, prompt: str, tools: Sequence[Mapping[str, Any]], finish_reason: str, identity: str
    ) -> Answer:
        """See ``read_answer``."""
        begun = self._spec.truncate_past_last_anchor(prompt) if self._spec.start_anchor_re.search(prompt) else ""
        texts, reasoning, calls = list[str](), list[str](), list[Message]()
        is_cut = finish_reason != "stop"
        for field, value in self._regions(begun + text, len(begun), tools, is_cut):
            if field in _REASONING:
                reasoning.append(value.strip())
            elif field in _CALLS:
                calls += value
            else:
                texts.append(value)
        if reasoning or calls or len(texts) > 1:
            texts = [each.strip() for each in texts]
        content = "\n".join(filter(None, texts))
        return answer_with(content, "\n".join(filter(None, reasoning)), calls, finish_reason, identity)

    def _regions(
        self, whole: str, first: int, tools: Sequence[Mapping[str, Any]], is_cut: bool
    ) -> Iterator[tuple[str, Any]]:
        """Field and value of each region, and of the text between them. first: where the sampled text begins."""
        start = at = 0  # of the text that no region has taken, and of what is not searched yet
        while (opened := self._next(whole, at)) is not None:
            name, mark = opened
            close = self._spec.fields[name].close_re
            end_mark = close.search(whole, mark.end()) if close is not None else None
            end = end_mark.end() if end_mark else len(whole)
            body = whole[mark.end() : end_mark.start() if end_mark else end]
            is_none = end <= mark.start() or (is_cut and end_mark is None and name in _CALLS)
            value = None if is_none else self._value(name, whole[mark.start() : end], body, tools)
            if value is None:
                at = max(mark.end(), mark.start() + 1)
                continue
            yield from self._between(whole[max(start, first) : max(mark.start(), first)])
            if end > first or name in _REASONING:
                yield name, value
            start = at = end
        yield from self._between(whole[max(start, first) :])

    def _next(self, whole: str, at: int) -> tuple[str, Any] | None:
        """The field whose mark comes first from ``at`` on, the longest of several, and the mark."""
        fields = [(name, field.open_re) for name, field in self._spec.fields.items() if field.open_re is not None]
        found = [(name, mark) for name, pattern in fields if (mark := pattern.search(whole, at)) is not None]
        return min(found, key=lambda each: (each[1].start(), -each[1].end()), default=None)

    def _between(self, text: str) -> Iterator[tuple[str, str]]:
        implicit = self._spec.implicit
        close = self._spec.fields[implicit].close_re if implicit else None
        said = "".join(close.split(text)) if close is not None else text
        if said:
            yield implicit if implicit in _REASONING else "content", said

    def _value(self, name: str, region: str, body: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        """What a region says; None if it does not parse or would lose a part, and for calls of a request without
        tools."""
        field = self._spec.fields[name]
        if name in _CALLS and (not tools or not _is_taken(field, body)):
            return None
        try:
            value = self._parse(region, self._spec, prefix="", tools=[dict(tool) for tool in tools]).get(name, "")
            if name in _CALLS:
                return [_call(each) for each in (value if isinstance(value, list) else [value])]
        except Exception:  # fault boundary: the parser is another library's, on what a model wrote
            return None
        return value if isinstance(value, str) and name in (*_REASONING, "content") else None


def _is_taken(field: Any, body: str) -> bool:
    """Whether the parser of tagged arguments takes all of a region: it leaves out what no tag takes."""
    pattern = field.content_args.get("tag_pattern") if field.content == "xml-inline" else None
    if pattern is None:
        return True
    import regex

    return not regex.sub(pattern, "", body, flags=regex.DOTALL).strip()


def _call(value: Any) -> Message:
    """``{"name": ..., "arguments": ...}`` of a parsed call. Raises ValueError or TypeError if it is none."""
    function = value.get("function", value) if isinstance(value, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments", {})
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not (isinstance(name, str) and name and isinstance(arguments, Mapping)):
        raise ValueError("no call")
    json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    return {"name": name, "arguments": arguments}
