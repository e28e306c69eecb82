r"""Numeric answers: 1 if the final number equals the label, else 0.

The final answer is the last ``\boxed{...}`` (MATH, Hendrycks et al. 2021, arXiv:2103.03874, section 3.1); else what
follows the last ``####`` (GSM8K, Cobbe et al. 2021, arXiv:2110.14168); else the last number of the text.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.types import Sample, Status
from rm_hub.answers import response_of

RELATIVE_TOLERANCE = Fraction(1, 10**6)
"""Rounding of a decimal answer that is forgiven, relative to the label; ours."""

# Longer literals are no answers but attempts to make the grader slow: exact arithmetic costs grow with the digits.
MAX_DIGITS = 64
MAX_EXPONENT = 64
MAX_CHARACTERS = 4096

# A minus after a digit, letter or bracket is a subtraction, not a sign.
_NUMBER = re.compile(
    r"(?:(?<![\w)\].])[-+])?\$?(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?"
    r"|(?:(?<![\w)\].])[-+])?(?<![\w.])\.\d+(?:[eE][-+]?\d+)?"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_BOXED = "\\boxed{"
_MARK = "####"


def score(args: Any, sample: Sample) -> float:
    """1.0 if the final number of the response equals the label and the sample ended by itself, else 0.0.

    Where both are whole numbers they must be equal; otherwise they may differ by a millionth of the label. An
    answer whose box or mark holds no number earns 0.0: other numbers of the text are not tried. A truncated
    answer earns 0.0, since its last number may be cut. Raises RewardError if the label is no number.
    """
    label = _label(sample)
    if sample.status is not Status.COMPLETED:
        return 0.0
    answer = final_number(response_of(args, sample))
    if answer is None:
        return 0.0
    if answer.denominator == 1 and label.denominator == 1:
        return float(answer == label)
    return float(abs(answer - label) <= RELATIVE_TOLERANCE * abs(label))


def final_number(text: str) -> Fraction | None:
    """The number that a text answers with, exactly; None if there is none or it is too long."""
    text = text[-MAX_CHARACTERS:]
    if _BOXED in text:
        return _first_number(_inside_braces(text[text.rindex(_BOXED) + len(_BOXED) :]))
    if _MARK in text:
        return _first_number(text[text.rindex(_MARK) + len(_MARK) :])
    literals = _literals(text)
    return _parse(literals[-1]) if literals else None


def _label(sample: Sample) -> Fraction:
    label = sample.label
    number: Fraction | None = None
    if isinstance(label, int | float) and not isinstance(label, bool):
        number = final_number(repr(label))
    elif isinstance(label, str):
        number = final_number(label)
    if number is None:
        raise RewardError(
            f"the label is {label!r:.80}",
            where=str(sample.uid or "rm_hub.numeric"),
            expected=f"a number of at most {MAX_DIGITS} digits, or text that ends in one",
        )
    return number


def _first_number(text: str) -> Fraction | None:
    literals = _literals(text)
    return _parse(literals[0]) if literals else None


def _literals(text: str) -> list[str]:
    return _NUMBER.findall(_LATEX_FRACTION.sub(r" \1/\2 ", text))


def _inside_braces(text: str) -> str:
    """The text up to the brace that closes one opened before it; empty where none does."""
    depth = 1
    for position, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:position]
    return ""


def _parse(literal: str) -> Fraction | None:
    plain = literal.replace(",", "").replace("$", "").lower()
    exponent = plain.partition("e")[2]
    if sum(map(str.isdigit, plain)) > MAX_DIGITS:
        return None
    if exponent and abs(int(exponent.partition("/")[0])) > MAX_EXPONENT:
        return None
    numerator, slash, denominator = plain.partition("/")
    if slash and int(denominator) == 0:
        return None
    return Fraction(numerator) / (int(denominator) if slash else 1)
