r"""DAPO's rule for mathematical answers: 1 if the normalised answer line equals the label, else -1.

Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 2.4 (rule-based reward of 1 and -1); the prompt asks for a
last line ``Answer: $Answer``. The normalisation is that of Lewkowycz et al. 2022, Minerva, arXiv:2206.14858,
appendix D.1, with the words that it removes in ``UNITS``, only where they are words; any other unit goes if it stands
in ``\text{...}``.
"""

from __future__ import annotations

import re
from typing import Any

from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.records.groups import Sample, Status
from rm_hub.answers import UNIT, answer_of, full_fractions, labels_of
from rm_hub.doubt import TEXT, opposed, taken_back

RIGHT, WRONG = 1.0, -1.0
LAST_CHARACTERS = 300
"""The answer is searched in the end of the response only, as in the grader that was published with the paper."""

UNITS = (
    "dollars", "cents", "degrees", "percent", "units", "hours", "minutes", "seconds", "meters", "feet", "inches", "cm",
    "km", "gm", "mph", "pounds", "points", "square", "ways", "integers", "digits", "students", "meals", "edges",
    "multiples",
)  # fmt: skip

_ANSWER = re.compile(r"answer\s*:", re.IGNORECASE)
_UNIT = re.compile(rf"(?<![a-z\\])(?:{'|'.join(UNITS)})(?![a-z])|\\l?dots(?![a-z])", re.IGNORECASE)
_WHOLE = re.compile(r"([-+]?)0*(\d+?)(?:\.0*)?")
_ARTICLE = re.compile(r"(?<![A-Za-z\\])an? (?=\S)")
_WRAPPED = re.compile(r"\\(?:boxed|overline)\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_SPACING = re.compile(r"(?<!\\)\\[,;: ]|~")
_SHORT_ROOT = re.compile(r"\\sqrt(\w)")
_SPACE = re.compile(r" (?=\d{3}(?![\d/]))|(?<!\d) | (?!\d)")  # the others, as of 2 1/2, keep two numbers apart
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    """1.0 if the last ``Answer:`` line equals the label (any one of a list) after normalisation, else -1.0.

    To a label of 033 or 33.0 the answer 33 is right, too. A response without such a line, or that refuses it ("Wrong
    answer: 33"), or that did not end by itself, earns -1.0. Raises RewardError without a label.
    """
    labels = labels_of(sample, reward="rm_hub.dapo")
    answer = answer_line(answer_of(args, sample))
    if sample.status is not Status.COMPLETED or answer is None:
        return WRONG
    normal = normalize(answer)
    return RIGHT if any(normal in accepted(label) and not opposed(answer, label) for label in labels) else WRONG


@rows_may_choose
def score_binary(args: Any, sample: Sample) -> float:
    """As ``score``, with 0.0 in place of -1.0."""
    return float(score(args, sample) == RIGHT)


def answer_line(text: str) -> str | None:
    """The line that follows the last ``Answer:``, or begins there; None where there is nothing, or it is refused."""
    text = text[-LAST_CHARACTERS:]
    *_, mark = (None, *_ANSWER.finditer(text))
    if mark is None:
        return None
    line, _, after = text[mark.end() :].lstrip(" \t\r\n*").partition("\n")
    return None if taken_back(text[: mark.end()], after) else line.strip(" \t*") or None


def accepted(label: str) -> tuple[str, str]:
    """A label as it is written, normalised, and as the shortest spelling of its number."""
    written = normalize(label)
    whole = _WHOLE.fullmatch(written)
    return written, f"{whole[1].strip('+')}{whole[2]}" if whole else written


def normalize(answer: str) -> str:
    r"""One spelling of an answer: ``x = \$1{,}000 \text{ cm}`` and ``1000`` become the same text."""
    answer = answer[-LAST_CHARACTERS:].strip().rstrip(".,")
    answer = answer.replace("\\!", "").replace("{,}", ",")
    for dropped in ("\\$", "\\%", "%", "\\left", "\\right", '"'):
        answer = answer.replace(dropped, "")
    answer = _SPACING.sub(" ", answer)
    if answer.count("$") >= 2:
        answer = answer.split("$")[-2]
    answer = answer.replace("$", "")
    while (inner := _WRAPPED.sub(r"\1", answer)) != answer:
        answer = inner
    answer = _without_unit(_without_text(_ARTICLE.sub("", answer.rpartition("=")[2])))
    answer = _SHORT_ROOT.sub(r"\\sqrt{\1}", full_fractions(answer))
    answer = answer.replace("^\\circ", "").replace("^{\\circ}", "")
    answer = _SPACE.sub("", " ".join(answer.split())).rstrip(".")
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


def _without_unit(answer: str) -> str:
    """Drop a unit beside something else; "hours" is an answer of its own."""
    bare = _UNIT.sub("", answer)
    return bare if bare.strip() else answer


def _without_text(answer: str) -> str:
    r"""Drop ``\text{...}`` beside something else (a unit); keep its content where it is the whole answer."""
    bare = UNIT.sub(" ", answer)
    return bare if bare.strip() else TEXT.sub(r"\1", answer)
