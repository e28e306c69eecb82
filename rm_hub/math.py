r"""Mathematical answers, compared by math-verify: fractions, sets, intervals, matrices, equations, symbolic forms.

Source: the package math-verify (Kydlíček et al. 2024, https://github.com/huggingface/Math-Verify), which parses LaTeX
into sympy. Its own time limits use SIGALRM, which cannot stop arithmetic that runs in C and fails off the main
thread; they are off. A synchronous reward runs in a process that is killed at ``--rm-timeout-s``, and what could
only end so is refused before it is parsed (``rm_hub/bounds.py``). Plain text is never handed to sympy's ``eval``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.types import Sample, Status
from rm_hub.answers import after_reasoning, labels_of, last_boxed, last_line, response_of
from rm_hub.bounds import MAX_CHARACTERS, is_bounded


def score(args: Any, sample: Sample) -> float:
    r"""1.0 if the final answer is mathematically equal to the label (any one of a list) and the sample ended by itself.

    The final answer is the last ``\boxed{...}`` after the reasoning, else what the last line states after ``:``,
    ``=`` or "is". The label is a LaTeX expression, with or without a box or dollars. An answer beyond the limits of
    ``rm_hub/bounds.py`` earns 1.0 only if it is the label's own text. Raises RewardError if there is no label, or
    math-verify is not installed.
    """
    labels = [_stated(label) for label in labels_of(sample, reward="rm_hub.math")]
    equal = _comparison()
    answer = _stated(after_reasoning(response_of(args, sample)))
    if sample.status is not Status.COMPLETED or not answer:
        return 0.0
    if answer in labels:
        return 1.0
    if not is_bounded(answer):
        return 0.0
    return float(any(is_bounded(label) and equal(label, answer) for label in labels))


def _stated(text: str) -> str:
    """The expression that a response or a label states; empty if there is none."""
    if "\\boxed" in text or "\\fbox" in text:
        return last_boxed(text) or ""
    line = last_line(text)[-MAX_CHARACTERS:].rstrip(". ")
    if line.count("$") >= 2:
        return line.strip("$").rpartition("$")[2].strip() if line.endswith("$") else line.split("$")[-2].strip()
    for mark in (": ", " is ", " = "):
        line = line.rpartition(mark)[2]
    return line.replace("$", "").strip()


@functools.cache  # the import of sympy takes a second
def _comparison() -> Callable[[str, str], bool]:
    """``(label, answer) -> whether they are equal``."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise RewardError(
            "math-verify is not installed", where="rm_hub.math", hint="pip install 'buffer-rl[math]'"
        ) from error
    # It warns that its time limits are off, as if nobody had set others.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(expression: str) -> list[Any]:
        boxed = f"\\boxed{{{expression}}}"
        found: list[Any] = parse(boxed, extraction, fallback_mode="no_fallback", parsing_timeout=None)
        return found

    def equal(label: str, answer: str) -> bool:
        return bool(verify(parsed(label), parsed(answer), timeout_seconds=None))

    return equal
