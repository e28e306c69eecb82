r"""Mathematical answers, compared by math-verify: fractions, sets, intervals, matrices, equations, symbolic forms.

Source: the package math-verify (Kydlíček et al. 2024, https://github.com/huggingface/Math-Verify), which parses LaTeX
into sympy. Its own time limits use SIGALRM, which cannot stop arithmetic that runs in C and fails off the main
thread; they are off. A synchronous reward runs in a process that is killed at ``--rm-timeout-s``, and what could
only end so is refused before it is parsed (``rm_hub/bounds.py``). Plain text never reaches sympy's ``eval``.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.records.groups import Sample, Status
from rm_hub.answers import answer_of, boxed_answers, labels_of, last_boxed, last_line, where
from rm_hub.bounds import MAX_CHARACTERS, is_bounded
from rm_hub.doubt import DOUBT, TEXT, differ_in_words, joined, taken_back

_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_PROSE = re.compile(r"\$|####|\b(?:is|answer)\b", re.IGNORECASE)
_QUOTED = re.compile(r"\\\$|\\text\{[^{}]*\}")
_DOLLARS = re.compile(r"\$(\d[\d,]*(?:\.\d+)?)")
_FULL_STOP = re.compile(r"(?<!\\right)(?<!\.)\.\Z")
_BOLD = re.compile(r"(?<![\w)}\]])\*\*(?=\S)|(?<=\S)\*\*(?![\w({\\])")  # 2**3 is a power
_MATH_MODE = re.compile(r"\$|(?<!\\)\\[()\[\]]|`")
_COLON = re.compile(r"(?<!\d): ")  # of "3: 4", a ratio, both numbers are the answer
# What the parser takes for products: 1\,000 for 1 * 0, 2 1/2 for 3/2.
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\,|\\ |~| )\d{3})+(?![\d/])")
_MIXED = re.compile(r"(?<![\d.])(\d+) +(\d+)/(\d+)(?!\d)")
_NEXT_EQUATION = re.compile(r"(?:,|\b(?:or|and|maybe|perhaps|possibly))\s*\w+$")
_DOUBT = re.compile(DOUBT)


@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    r"""1.0 if the final answer is mathematically equal to the label (any one of a list) and the sample ended by itself.

    The final answer is the ``\boxed{...}`` after the reasoning (of several, each must be right), else what the last
    line states after ``:``, ``=``, ``####`` or "is". There is none if the words beside it refuse it or leave it open
    (``rm_hub/doubt.py``). Words are compared as text. The label is one LaTeX expression as a whole (``3: 4`` is a
    ratio), in dollars or without, a price (``$18``), or text with such an expression in a box. Decimals count to six
    places, or to four digits of the label's smallest number where these end later. An answer beyond the limits of
    ``rm_hub/bounds.py`` earns 1.0 only if it is the label's own text. Raises RewardError if there is no label, or one
    with words around an expression, or math-verify is not installed.
    """
    labels = [_label(label, sample) for label in labels_of(sample, reward="rm_hub.math")]
    equal = _comparison()
    answers = _stated(answer_of(args, sample))
    if sample.status is not Status.COMPLETED or not answers:
        return 0.0
    return float(all(answer and _is_right(answer, labels, equal) for answer in answers))


def _is_right(answer: str, labels: list[str], equal: Callable[[str, str], bool]) -> bool:
    if answer in labels:
        return True
    if not is_bounded(answer) or any(_DOUBT.search(text) for text in TEXT.findall(answer)):
        return False
    candidates = [label for label in labels if is_bounded(label) and not differ_in_words(answer, label)]
    return any(equal(label, answer) for label in candidates)


def _label(text: str, sample: Sample) -> str:
    """The expression that a label is as a whole, or has in its last box."""
    if price := _DOLLARS.fullmatch(text.strip()):
        return price[1]
    boxed = "\\boxed" in text or "\\fbox" in text
    expression = _FULL_STOP.sub("", last_boxed(text) or "") if boxed else _undelimited(text.rstrip(". \n"))
    if not expression or (not boxed and _PROSE.search(_QUOTED.sub("", expression))):
        expected = "one LaTeX expression and nothing else, or text with one in its last \\boxed{...}"
        raise RewardError(f"the label is {text!r:.80}", where=where(sample, "rm_hub.math"), expected=expected)
    return expression


def _undelimited(text: str) -> str:
    """The text without the dollars around all of it, or what LaTeX has in their place."""
    text = text.strip()
    for opening, closing in _DELIMITERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            return text[len(opening) : -len(closing)].strip()
    return text


def _stated(text: str) -> list[str]:
    """The expressions that a response states as its answer: of each box, or of the last line."""
    if (boxes := boxed_answers(text)) is not None:
        return [_FULL_STOP.sub("", box) for box in boxes]
    line = _BOLD.sub("", last_line(text)[-MAX_CHARACTERS:]).rpartition("####")[2].strip("* ").rstrip(". *")
    if line.count("$") >= 2:
        *before, answer, after = line.split("$")
        several = len(before) > 2 and before[-2] != answer and joined(before[-1])
        return [] if several or taken_back("$".join(before), after) else [answer.strip()]
    whole = line
    line = _COLON.split(line)[-1].rpartition(" is ")[2]
    equations, _, value = line.rpartition(" = ")
    # Of several equations no single one is the answer.
    if " = " not in equations or not _NEXT_EQUATION.search(equations):
        line = value
    return [] if taken_back(whole.removesuffix(line), "") else [_MATH_MODE.sub("", line).strip("* ")]


@functools.cache  # the import of sympy takes a second
def _comparison() -> Callable[[str, str], bool]:
    """``(label, answer) -> whether they are equal``."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        hint = "pip install 'buffer-rl[math]'"
        raise RewardError("math-verify is not installed", where="rm_hub.math", hint=hint) from error
    _read_numbers_as_literals()
    # It warns that its time limits are off, although the process has a limit of its own.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(expression: str) -> list[Any]:
        expression = _MIXED.sub(r"\1\\frac{\2}{\3}", expression)
        expression = _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number.group()), expression)
        boxed = f"\\boxed{{{expression}}}"
        found: list[Any] = parse(boxed, extraction, fallback_mode="no_fallback", parsing_timeout=None)
        return found

    def equal(label: str, answer: str) -> bool:
        gold = parsed(label)
        # By themselves six decimals, and 15 of a difference: below 1e-6 all numbers would be equal.
        digits = {"float_rounding": 3 + (place := _first_place(gold)), "numeric_precision": 12 + place}
        return bool(verify(gold, parsed(answer), timeout_seconds=None, **digits))

    return equal


def _first_place(label: list[Any]) -> int:
    """The decimal place of the first digit of the smallest number in a parsed label, 0 excepted; at least 3."""
    from sympy import preorder_traversal

    place, nodes = 3, preorder_traversal(label)
    for node in nodes:
        if getattr(node, "is_number", False):
            nodes.skip()
            with suppress(ArithmeticError, TypeError, ValueError):  # of what has no size: infinity, 1/0
                place = max(place, math.ceil(-math.log10(abs(complex(node.doit())))))
    return place


def _read_numbers_as_literals() -> None:
    """Has the LaTeX parser make its numbers itself: ``sympy.Number(text)`` passes the text of each to ``eval``."""
    from latex2sympy2_extended import latex2sympy2
    from sympy import Float, Integer

    def number(text: str) -> Any:
        text = text.replace(",", "").replace(" ", "")
        return Integer(int(text)) if text.isdecimal() else Float(text)

    def first_number(text: str) -> Any:  # of an expression that is a number and nothing else: 0,5 is a half
        return number(text.replace(",", ".") if text.startswith("0") else text)

    parser: Any = getattr(latex2sympy2, "_Latex2Sympy", None)
    if not (hasattr(latex2sympy2, "convert_number") and hasattr(parser, "parse_number")):
        what = "this version of latex2sympy2-extended is not known to keep text from eval"
        hint = "pip install 'buffer-rl[math]' 'latex2sympy2-extended==1.11.0'"
        raise RewardError(what, where="rm_hub.math", hint=hint)
    latex2sympy2.convert_number = first_number
    parser.parse_number = lambda self, text: number(text)
