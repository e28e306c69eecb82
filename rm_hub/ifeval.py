"""Instructions whose following can be verified by a program: lengths, keywords, case, format.

Source: Zhou et al. 2023, IFEval, arXiv:2311.07911, table 1; the ids and arguments are those of its data set. Left
out are those that need a language model, a language detector or a sentence splitter. Ours is
``startend:start_checker``. Every check takes time linear in the response, and keywords are text, not patterns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.records.groups import Sample, Status
from rm_hub.answers import answer_of, where

_WORD = re.compile(r"\w+")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]*\]")
_HIGHLIGHT = re.compile(r"\*\*[^\n*]*[^\n*\s][^\n*]*\*\*|\*[^\n*]*[^\n*\s][^\n*]*\*")
_TITLE = re.compile(r"<<[^\n<>]*[^\n<>\s][^\n<>]*>>")


@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    """1.0 if the response follows every instruction of the row and ended by itself, else 0.0.

    The metadata holds ``instruction_id_list`` and, in the same order, ``kwargs``, one mapping for each id; entries
    that are None count as absent. What follows the reasoning is checked; an empty response follows nothing. Raises
    RewardError for an unknown id, and for arguments that are missing, unknown or of the wrong type.
    """
    return float(all(_followed(args, sample)))


@rows_may_choose
def score_fraction(args: Any, sample: Sample) -> float:
    """The fraction of the instructions that are followed, 0 to 1; otherwise as ``score``."""
    followed = _followed(args, sample)
    return sum(followed) / len(followed)


def _followed(args: Any, sample: Sample) -> list[bool]:
    place = where(sample, "rm_hub.ifeval")
    checks = [_check(name, given, place) for name, given in instructions_of(sample, place)]
    text = answer_of(args, sample).strip()
    if sample.status is not Status.COMPLETED or not text:
        return [False] * len(checks)
    return [check(text) for check in checks]


def instructions_of(sample: Sample, place: str) -> list[tuple[Any, Any]]:
    """The id and the arguments of each instruction of a row. place: names the row in an error. Raises RewardError."""
    ids, kwargs = sample.metadata.get("instruction_id_list"), sample.metadata.get("kwargs")
    if not isinstance(ids, list) or not ids or not isinstance(kwargs, list) or len(ids) != len(kwargs):
        what = "the row does not say which instructions it has"
        expected = 'metadata {"instruction_id_list": [ID, ...], "kwargs": [{...}, ...]}, of one length, not empty'
        raise RewardError(what, where=place, expected=expected)
    return [(name, given or {}) for name, given in zip(ids, kwargs, strict=True)]


def _check(name: Any, given: Any, place: str) -> Callable[[str], bool]:
    place = f"{place}, instruction {name!r}"
    rule = INSTRUCTIONS.get(name) if isinstance(name, str) else None
    if rule is None:
        raise RewardError("there is no such instruction", where=place, expected=f"one of {', '.join(INSTRUCTIONS)}")
    present = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    if not isinstance(given, Mapping) or set(present) != set(rule.arguments):
        expected = f"the arguments {', '.join(rule.arguments) or 'none'}"
        raise RewardError(f"its kwargs are {given!r:.120}", where=place, expected=expected)
    values = {}
    for key, value in present.items():
        values[key] = rule.arguments[key](value)
        if values[key] is None:
            expected = _EXPECTED.get(rule.arguments[key], "another value")
            raise RewardError(f"{key} is {value!r:.80}", where=place, expected=expected)
    return lambda text: rule.follows(text, **values)


def _count(value: Any) -> int | None:
    """A whole number; columns of tables store them as floats."""
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)
    return int(value) if whole else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _texts(value: Any) -> list[str] | None:
    return value if isinstance(value, list) and value and all(_text(entry) for entry in value) else None


def _relation(value: Any) -> str | None:
    return value if value in ("at least", "less than") else None


_EXPECTED: Mapping[Callable[[Any], Any], str] = {
    _count: "a whole number",
    _text: "text",
    _texts: "a list of texts",
    _relation: "'at least' or 'less than'",
}


def _related(number: int, relation: str, bound: int) -> bool:
    return number >= bound if relation == "at least" else number < bound


def _occurrences(text: str, word: str) -> int:
    """How often ``word`` stands in the text as a whole word, whatever its case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _json(text: str) -> bool:
    body = text.removesuffix("```").strip()
    for fence in ("```json", "```JSON", "```"):
        body = body.removeprefix(fence)
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _bullets(text: str) -> int:
    lines = [line.lstrip() for line in text.splitlines()]
    return sum(line.startswith("-") or (line.startswith("*") and not line.startswith("**")) for line in lines)


def _paragraphs(text: str) -> int:
    """Texts divided by ``***``. A divider at the start or end divides nothing; two side by side are no answer: -1."""
    parts = [part.strip() for part in text.split("***")]
    return sum(map(bool, parts)) if all(parts[1:-1]) else -1


@dataclass(frozen=True, slots=True)
class Instruction:
    """follows: ``(text, **arguments) -> bool``. arguments: by name, what reads a value, or answers None."""

    follows: Callable[..., bool]
    arguments: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)


INSTRUCTIONS: Mapping[str, Instruction] = {
    "keywords:existence": Instruction(
        lambda text, keywords: all(word.lower() in text.lower() for word in keywords), {"keywords": _texts}
    ),
    "keywords:frequency": Instruction(
        lambda text, keyword, frequency, relation: _related(_occurrences(text, keyword), relation, frequency),
        {"keyword": _text, "frequency": _count, "relation": _relation},
    ),
    "keywords:forbidden_words": Instruction(
        lambda text, forbidden_words: not any(_occurrences(text, word) for word in forbidden_words),
        {"forbidden_words": _texts},
    ),
    "keywords:letter_frequency": Instruction(
        lambda text, letter, let_frequency, let_relation: _related(
            text.lower().count(letter.lower()), let_relation, let_frequency
        ),
        {"letter": _text, "let_frequency": _count, "let_relation": _relation},
    ),
    "length_constraints:number_words": Instruction(
        lambda text, num_words, relation: _related(len(_WORD.findall(text)), relation, num_words),
        {"num_words": _count, "relation": _relation},
    ),
    "length_constraints:number_paragraphs": Instruction(
        lambda text, num_paragraphs: _paragraphs(text) == num_paragraphs, {"num_paragraphs": _count}
    ),
    "detectable_content:number_placeholders": Instruction(
        lambda text, num_placeholders: len(_PLACEHOLDER.findall(text)) >= num_placeholders, {"num_placeholders": _count}
    ),
    "detectable_content:postscript": Instruction(
        lambda text, postscript_marker: any(
            line.lstrip().lower().startswith(postscript_marker.lower()) for line in text.splitlines()
        ),
        {"postscript_marker": _text},
    ),
    "detectable_format:number_bullet_lists": Instruction(
        lambda text, num_bullets: _bullets(text) == num_bullets, {"num_bullets": _count}
    ),
    "detectable_format:number_highlighted_sections": Instruction(
        lambda text, num_highlights: len(_HIGHLIGHT.findall(text)) >= num_highlights, {"num_highlights": _count}
    ),
    "detectable_format:multiple_sections": Instruction(
        lambda text, section_spliter, num_sections: (
            len(re.findall(rf"{re.escape(section_spliter)}\s?\d", text)) >= num_sections
        ),
        {"section_spliter": _text, "num_sections": _count},
    ),
    "detectable_format:json_format": Instruction(_json),
    "detectable_format:title": Instruction(lambda text: _TITLE.search(text) is not None),
    "startend:start_checker": Instruction(
        lambda text, start_phrase: text.lstrip('"').lower().startswith(start_phrase.strip().lower()),
        {"start_phrase": _text},
    ),
    "startend:end_checker": Instruction(
        lambda text, end_phrase: text.strip('"').strip().lower().endswith(end_phrase.strip().lower()),
        {"end_phrase": _text},
    ),
    "startend:quotation": Instruction(lambda text: len(text) > 1 and text[0] == text[-1] == '"'),
    "change_case:english_capital": Instruction(lambda text: text.isupper()),
    "change_case:english_lowercase": Instruction(lambda text: text.islower()),
    "change_case:capital_word_frequency": Instruction(
        lambda text, capital_frequency, capital_relation: _related(
            sum(word.isupper() for word in _WORD.findall(text)), capital_relation, capital_frequency
        ),
        {"capital_frequency": _count, "capital_relation": _relation},
    ),
    "punctuation:no_comma": Instruction(lambda text: "," not in text),
}
