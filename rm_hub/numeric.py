r"""Numeric answers: 1 if the final number equals the label, else 0.

After the reasoning, the final answer is what each ``\boxed{...}`` holds (MATH, Hendrycks et al. 2021, arXiv:2103.03874,
section 3.1); else what follows each ``####`` on its line (GSM8K, Cobbe et al. 2021, arXiv:2110.14168); else the last
number of the text. Boxes or marks with different numbers are no answer, nor is a number that the words beside it refuse
or leave open ("34 is wrong", "33 or maybe 34"; ``rm_hub/doubt.py``). A ``####`` before a word or a numbered title
(``#### Step 1``, ``#### 2. Total``) is a Markdown heading, which is no mark.

A label, a box and what follows ``####`` must be one number as a whole: ``-1,000``, ``1{,}000.5``, ``1\,000``, ``.5``,
``1e-3``, ``3/4``, ``\frac{3}{4}``. Left out are a currency sign, a percent sign (``50\%`` is 50), a degree sign, a
letter and ``=`` before the number (``x = 5``), and a unit: any in ``\text{...}`` or ``\mathrm{...}``, also with the
number (``\text{72 clips}``), and the symbols ``UNITS`` without (``72\,km``). An expression (``2\sqrt{3}``) and a number
with other words beside it (``72 apples``) are no number.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.records.groups import Sample, Status
from rm_hub.answers import answer_of, boxed_answers, last_boxed, where
from rm_hub.doubt import DOUBT, joined, taken_back

RELATIVE_TOLERANCE = Fraction(1, 10**6)
"""Rounding of a decimal answer that is forgiven, relative to the label; ours."""

# Longer literals are no answers but attempts to make the grader slow: exact arithmetic costs grow with the digits.
MAX_DIGITS = 64
MAX_EXPONENT = 64
MAX_CHARACTERS = 4096

UNITS = ("mm", "cm", "dm", "km", "mg", "kg", "ml", "mL", "ft", "km/h", "m/s", "mph")
"""Symbols that are units without ``\\text{...}`` too. A single letter may be a variable."""

_MARK = re.compile(
    r"####\s*+(?:\*\*\s*+)?(?![0-9]{1,2}[.)][ \t]+[^\W\d])(?=(?:[A-Za-z] ?= ?)?[-+.$€£¥\\\d\u2212\u2013]|\Z)"
)
_GROUP = r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)"
_SPELLINGS = (
    (re.compile("[\N{MINUS SIGN}\N{EN DASH}]"), "-"),
    (re.compile(r"\{,\}|(?<=\d)\\,(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(rf"{_GROUP}\{{(\s*[-+]?\$?\d[\d.,]*\s*)\}}"), r" \1 "),
    (re.compile(rf"({_GROUP})\{{(\s*[-+]?\$?\d[\d.,]*)(\s[^{{}}\d]*)\}}"), r" \2\1{\3}"),
    (re.compile(r"(?<=[\w.)}\]])\\[dt]?frac"), r" \\frac"),  # beside another factor, as of a mixed number
    (re.compile(r"\\[dt]?frac(?:\{\s*(-?\d+)\s*\}\{\s*(\d+)\s*\}|(\d)(\d))"), r"\1\3/\2\4 "),
    (re.compile(r"\\[,;: ]|~"), " "),
    (re.compile(r"=\s*-\s+(?=[\d.$])"), "= -"),
)

_LITERAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?"
_CURRENCY = "[$€£¥]"
_SCALE = "dozen|hundred|thousand|million|billion|trillion"  # a number beside one of these is another number
_IN_UNIT = r"(?:[^{}\d^]|(?<=[A-Za-z])\^(?:-?[1-9]|\{-?[1-9]\}))"
_UNIT = rf"{_GROUP}\{{(?!{_IN_UNIT}*(?:{_SCALE}|{DOUBT})){_IN_UNIT}*\}}(?:\^\{{?[23]\}}?)?"
_WHOLE = re.compile(  # of a text with single spaces
    rf"(?:[A-Za-z] ?= ?)?(?:([-+]) ?{_CURRENCY}? ?|{_CURRENCY} ?([-+]?) ?|)({_LITERAL})\.?"
    rf" ?(?:%|{_CURRENCY}|(?:°|\^\{{?\\circ\}}?|\\degree)(?: ?[CF])?)?"
    rf" ?(?:{_UNIT}|(?:{'|'.join(UNITS)})(?:\^\{{?[23]\}}?)?)? ?\.?"
)
_WRAPPERS = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))

# Words and their digits (CO2, x_1) are names. A minus after a digit, letter or bracket is a subtraction, not a sign.
_TOKEN = re.compile(
    rf"\\[a-zA-Z]+|[^\W\d]\w*(?:(?<=_)\{{[^{{}}]*\}})?|(?P<number>(?:(?<![\w)\].}}])[-+]\$?|\$-?)?{_LITERAL})"
)
_UNEQUAL = r"(?:[≠≤≥]|!=| [<>]=? |\\(?:neq?|leq?|geq?|lt|gt)(?![a-zA-Z]))"
_OPERATOR = r"(?:[\u00d7·÷√]|\\(?:cdot|times|div|pm|sqrt|[dt]?frac|pi))"
_PART_BEFORE = re.compile(rf"(?:[\^{{]|\d(?:[.,:]| +)|(?:[\d)\]}}]\s*\*|[\w)\]}}]\s*\+|/|{_OPERATOR}|{_UNEQUAL})\s*)\Z")
_PART_AFTER = re.compile(
    rf"\s*(?:{_OPERATOR}|\+\s*[\w\\($]|\*\s*[\d(]|(?:{_GROUP}\{{\s*)?(?:{_SCALE}))"
    r"|[+*/]?(?:[inxyz](?![A-Za-z])|[π²³¼½¾({])|\^(?!\{?\\circ)"
)
_WORDED_UNIT = re.compile(rf"(?<=\d)(?:\s*{_UNIT}| ?(?:[a-z]{{2,}}|m)\^\{{?[23]\}}?(?!\w))")


@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    """1.0 if the final number of the response equals the label and the sample ended by itself, else 0.0.

    Where both are whole numbers they must be equal; otherwise they may differ by a millionth of the label. An answer
    that has anything but one number in its box or on the line of its mark earns 0.0: other numbers of the text are not
    tried. A truncated answer earns 0.0, since its last number may be cut. Raises RewardError if the label is neither
    one number (a number, or text that is one as a whole) nor text with one in a box or after ``####``.
    """
    label = _label(sample)
    if sample.status is not Status.COMPLETED:
        return 0.0
    answer = final_number(answer_of(args, sample))
    if answer is None:
        return 0.0
    if answer.denominator == 1 and label.denominator == 1:
        return float(answer == label)
    return float(abs(answer - label) <= RELATIVE_TOLERANCE * abs(label))


def final_number(text: str) -> Fraction | None:
    """The number that a text answers with, exactly; None if there is none or it is too long.

    Without a box and a mark: the last number, or None where that is a part of an expression (``x^2``, ``2*3``).
    """
    answers = boxed_answers(text)
    if answers is None:
        ends = [mark.end() for mark in _MARK.finditer(text)]
        if not ends:
            return _last_number(text)
        padded = f"{text}\n"
        lines = [text[end : padded.index("\n", end)] for end in ends]
        after = text[ends[-1] + len(lines[-1]) :]
        answers = [] if taken_back("", after) else [line.strip("* \t") for line in lines]
    numbers = {whole_number(answer) for answer in answers}
    return numbers.pop() if len(numbers) == 1 else None


def whole_number(text: str) -> Fraction | None:
    """The number that the text is as a whole; None if it is none, or too long."""
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        return None
    for opening, closing in _WRAPPERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    found = _WHOLE.fullmatch(" ".join(_plain(text).split()))
    return _parse((found[1] or found[2] or "") + found[3]) if found else None


def _marked(text: str) -> str | None:
    """What the last box holds, else the line that follows the last mark; None in a text without either."""
    if "\\boxed" in text or "\\fbox" in text:
        return last_boxed(text) or ""
    *_, mark = (None, *_MARK.finditer(text))
    return text[mark.end() :].partition("\n")[0].strip("* \t") if mark else None


def _last_number(text: str) -> Fraction | None:
    if len(text) > MAX_CHARACTERS:
        text = text[-MAX_CHARACTERS:].partition(" ")[2]  # the first word may be cut
    text = _WORDED_UNIT.sub(" ", _plain(text))
    numbers = [found for found in _TOKEN.finditer(text) if found["number"]]
    if not numbers:
        return None
    number = numbers[-1]
    before, after = text[: number.start()], text[number.end() :]
    if _PART_BEFORE.search(before[-MAX_DIGITS:]) or _PART_AFTER.match(after):
        return None
    value = _parse(number.group())
    if taken_back(before, after):
        return None
    other = numbers[-2] if len(numbers) > 1 else None
    if other and joined(text[other.end() : number.start()]) and _parse(other.group()) != value:
        return None
    return value


def _label(sample: Sample) -> Fraction:
    label = sample.label
    number: Fraction | None = None
    if isinstance(label, int | float) and not isinstance(label, bool):
        number = whole_number(str(label))
    elif isinstance(label, str):
        marked = _marked(label)
        number = whole_number(label if marked is None else marked)
    if number is None:
        what, places = f"the label is {label!r:.80}", "in its last \\boxed{...} or after its last ####"
        expected = f"one number of at most {MAX_DIGITS} digits and nothing else, or text with such a number {places}"
        hint = "name the field that holds it with --label-key; for expressions there is --rm-type math"
        raise RewardError(what, where=where(sample, "rm_hub.numeric"), expected=expected, hint=hint)
    return number


def _plain(text: str) -> str:
    """One spelling of signs, separators, fractions and spaces."""
    for spelling, plain in _SPELLINGS:
        text = spelling.sub(plain, text)
    return text


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
