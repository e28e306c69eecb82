r"""The DeepScaleR rule for mathematical answers: 1 if the boxed answer after the reasoning equals the label, else 0.

Source: Luo et al. 2025, DeepScaleR (https://github.com/agentica-project/rllm): the box after ``</think>``, equal as
normalised text or mathematically, after the grader of PRM800K (Lightman et al. 2023, arXiv:2305.20050). Where that
grader asks sympy, which evaluates text as Python, this one compares values (``rm_hub/expressions.py``). The units that
it drops are that grader's. ``score_boxed`` is the same comparison wherever the box stands.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.records.groups import Sample, Status
from rm_hub.answers import (
    END_OF_REASONING,
    UNIT,
    after_reasoning,
    boxed_answers,
    full_fractions,
    has_answer,
    labels_of,
    last_boxed,
)
from rm_hub.doubt import TEXT, differ_in_words
from rm_hub.expressions import MAX_CHARACTERS, equal

END_OF_INSTRUCTION = "###Response"
"""Where the answer starts in a response without ``</think>``, as in the source."""

_SPACING = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|(?<!\\)\\[,;:! ]|\s+|\\\$|\$|\^\{?\\circ\}?|\\degree(?![a-z])|\\?%"
)
_OR = "\u2228"
_SPELLINGS = tuple(
    (re.compile(pattern), kept)
    for pattern, kept in (
        (r"\\leq?(?![a-zA-Z])", "≤"),
        (r"\\geq?(?![a-zA-Z])", "≥"),
        (r"\\infty(?![a-zA-Z])|(?<![a-zA-Z\\])inf(?![a-zA-Z])", "∞"),
        (r"\\(?:emptyset|varnothing)(?![a-zA-Z])", "∅"),
        (r"\\[lr]vert(?![a-zA-Z])", "|"),
        (r"(?<=\{)[bpvBV]matrix(?=\})", "matrix"),
        (r"\\text\{\s*(?:or|and)\s*\}|(?<![^\s}])(?:or|and)(?![^\s{\\])", _OR),
        (r"([_^])\{(\w)\}", r"\1\2"),
    )
)
_UNIT_WORD = re.compile(
    r"(?<![a-zA-Z\\])(?:(?:degree|centimeter|meter|mile|second|minute|hour|day|week|month|year|yard)s?|cm|foot|feet|inch(?:es)?)"
    r"(?![a-zA-Z])(?:\s*\^\d)?"
)
_BRACED = re.compile(r"\{+([^{}]+)\}+")
_SCIENTIFIC = re.compile(r"([-+]?\d{1,20}(?:\.\d{1,20})?)e([-+]?\d{1,2})")
_SPACE = re.compile(r"(?<!\\)\\ |~")
_WORDS_BETWEEN = re.compile(rf"(?<=[\d )}}]){UNIT.pattern}(?=\s*\d)")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_INTEGER = re.compile(r"[-+]?\d+(?:\.0*)?")
_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}|(-?)(\d+)/(\d+)")
# White space between digits means something, except where it separates thousands.
_MIXED = re.compile(r"(?<![\w.])(\d+)\s+(\d+/\d+)")
_APART = re.compile(r"(?<=\d)(?:\s|\\[,;: ])+(?=\d)(?!\d{3}(?!\d))")
_DIGIT = re.compile(r"\d")
_SCALE = re.compile(r"(?:\\(?:text|mathrm)\{\s*)?\b(million|billion|trillion)\b(?:\s*\})?")
_ZEROS = {"million": 6, "billion": 9, "trillion": 12}
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    r"""1.0 if the last ``\boxed{...}`` after ``</think>`` equals the label (any one of a list), else 0.0.

    Without ``</think>`` or a box there is no answer: 0.0, as for a sample that did not end by itself, for one whose
    last ``<think>`` never ends, and for a box that the words beside it refuse or leave open (``rm_hub/doubt.py``).
    Labels may be boxed. Words are compared as text, expressions in value. As in the source, a whole number must be
    written as one (not ``1+1``), and where the label is a fraction, a fraction must be that one, neither reduced nor
    expanded: in lowest terms, if the labels are. Raises RewardError without a label.
    """
    if END_OF_REASONING in sample.response:
        return _score(after_reasoning(sample.response), sample)
    return _score(sample.response.partition(END_OF_INSTRUCTION)[2], sample)


@rows_may_choose
def score_boxed(args: Any, sample: Sample) -> float:
    r"""As ``score``, for the last ``\boxed{...}`` of the whole response, with or without ``</think>`` before it."""
    return _score(sample.response if has_answer(sample) else "", sample)


def _score(text: str, sample: Sample) -> float:
    labels = [last_boxed(label) or label for label in labels_of(sample, reward="rm_hub.deepscaler")]
    *_, boxed = ["", *(boxed_answers(text) or [])]
    if sample.status is not Status.COMPLETED or not boxed or len(boxed) > MAX_CHARACTERS:
        return 0.0
    answer = normalize(boxed)
    return float(any(same(answer, normalize(label)) and not differ_in_words(boxed, label) for label in labels))


def normalize(answer: str) -> str:
    """One spelling: no white space, units, currency, percent signs or separators of thousands."""
    for spelling, kept in _SPELLINGS:
        answer = spelling.sub(kept, answer)
    answer = _SCALE.sub(lambda scale: f"*10^{{{_ZEROS[scale[1]]}}}", answer)
    answer = _SPACE.sub(" ", answer)
    bare = UNIT.sub("", _WORDS_BETWEEN.sub(";", answer))
    answer = bare if bare.strip() else TEXT.sub(r"\1", answer)
    answer = _UNIT_WORD.sub("", answer) if _DIGIT.search(answer) else answer
    answer = _APART.sub(";", _MIXED.sub(r"(\1+\2)", answer.strip()))
    answer = full_fractions(_SPACING.sub("", answer).replace("{,}", ","))
    if len(_elements(answer)) == 1:  # of a point (1,234) the comma separates its numbers
        answer = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), answer)
    answer = answer.rstrip(".").lower()
    if braced := _BRACED.fullmatch(answer):
        answer = braced[1]
    if number := _SCIENTIFIC.fullmatch(answer):
        return str(Fraction(number[1]) * Fraction(10) ** int(number[2]))
    variable, equals, value = answer.partition("=")
    return value if equals and len(variable) == 1 and variable.isalpha() else answer


def same(answer: str, label: str) -> bool:
    """Whether two normalised answers are equal: as text, element by element (tuples, intervals), or in value. "1 or 2",
    "1,2" and the set of both are one text."""
    if not answer:
        return False
    if _listed(answer) == _listed(label):
        return True
    answers, expected = _elements(answer), _elements(label)
    if len(answers) != len(expected) or (len(answers) > 1 and answer[:: len(answer) - 1] != label[:: len(label) - 1]):
        return False
    return all(_same_element(one, other) for one, other in zip(answers, expected, strict=True))


def _listed(answer: str) -> str:
    return answer.removeprefix("\\{").removesuffix("\\}").replace(_OR, ",")


def _same_element(answer: str, label: str) -> bool:
    if answer == label:
        return True
    if bool(_INTEGER.fullmatch(answer)) != bool(_INTEGER.fullmatch(label)):
        return False
    fraction, expected = _FRACTION.fullmatch(answer), _FRACTION.fullmatch(label)
    if fraction and expected:
        return _parts(fraction) == _parts(expected)
    return len(label) <= MAX_CHARACTERS and not differ_in_words(answer, label) and equal(answer, label)


def _parts(fraction: re.Match[str]) -> tuple[bool, int, int]:
    sign, above, below = fraction.group(1, 2, 3) if fraction[2] else fraction.group(4, 5, 6)
    numerator = int(above)
    return (sign == "-") != (numerator < 0), abs(numerator), int(below)


def _elements(answer: str) -> list[str]:
    r"""The parts of a tuple, interval or set in brackets, split at commas outside inner brackets."""
    inner = answer.replace("\\{", "{").replace("\\}", "}")
    if len(inner) < 2 or inner[0] not in _BRACKETS or inner[-1] not in ")]}" or "," not in inner:
        return [answer]
    parts, depth, start = [], 0, 1
    for position, character in enumerate(inner[1:-1], 1):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:  # the first bracket closed before the end: no tuple
            return [answer]
        if character == "," and depth == 0:
            parts.append(inner[start:position])
            start = position + 1
    return [*parts, inner[start:-1]]
