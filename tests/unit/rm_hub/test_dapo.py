from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.records.groups import Sample, Status
from rm_hub.dapo import LAST_CHARACTERS, answer_line, normalize, score, score_binary


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("34", "34"),
        (" 34. ", "34"),
        ("$34$", "34"),
        ("x = 34", "34"),
        ("1,234,567", "1234567"),
        ("1{,}000", "1000"),
        ("(1,234)", "(1,234)"),
        (r"\$5", "5"),
        ("10 dollars", "10"),
        ("10 km", "10"),
        ("10 square units", "10"),
        ("4 hours 2", "4 2"),
        ("10,", "10"),
        ('"10"', "10"),
        (r"50\%", "50"),
        (r"5 \text{ cm}", "5"),
        (r"15\text{ cm}^2", "15"),
        (r"15\,\mathrm{m^{2}}", "15"),
        (r"15~\text{cm}", "15"),
        (r"15\ \text{cm}", "15"),
        (r"\text{east}", "east"),
        ("hours", "hours"),
        (r"\text{hours}", "hours"),
        ("2 1/2", "2 1/2"),
        ("1 000", "1000"),
        ("5 feet 6 inches", "5 6"),
        (r"5\text{ or }6", "5 6"),
        ("x + 1", "x+1"),
        (r"\boxed{7}", "7"),
        (r"\boxed{x = 7}", "7"),
        (r"x = \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac{1}2", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"90^\circ", "90"),
        (r"\left(1, 2\right)", "(1,2)"),
        ("a circle", "circle"),
        (r"\alpha + a", r"\alpha+a"),
        ("", ""),
    ],
)
def test_spellings_of_one_answer_become_one_text(answer: str, normal: str) -> None:
    assert normalize(answer) == normal


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Answer: 34", "34"),
        ("so\n**Answer:** 34", "34"),
        ("answer : $x$\nmore", "$x$"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("Answer:", None),
        ("**Answer:**\n\n**34**", "34"),
        ("Answer:\n", None),
        ("34", None),
        ("Answer: 34" + "." * LAST_CHARACTERS, None),
    ],
)
def test_the_last_answer_line_near_the_end_counts(text: str, line: str | None) -> None:
    assert answer_line(text) == line


@pytest.mark.parametrize(
    ("response", "label", "status", "right"),
    [
        ("Answer: 34", 34, Status.COMPLETED, True),
        ("Answer: 34", ["33", "34"], Status.COMPLETED, True),
        ("Answer: $1,000$", "1000", Status.COMPLETED, True),
        ("Answer: 33", "033", Status.COMPLETED, True),
        ("Answer: 033", "033", Status.COMPLETED, True),
        ("Answer: 33", 33.0, Status.COMPLETED, True),
        ("Answer: -5", "-05", Status.COMPLETED, True),
        ("Answer: 3", 3.5, Status.COMPLETED, False),
        ("Answer: 0", "000", Status.COMPLETED, True),
        ("Answer: 35", 34, Status.COMPLETED, False),
        ("34", 34, Status.COMPLETED, False),
        ("Answer: 34", 34, Status.TRUNCATED, False),
        ("Answer: 34</think>Answer: 35", 34, Status.COMPLETED, False),
    ],
)
def test_right_is_1_and_wrong_is_minus_1_or_0(response: str, label: Any, status: Status, right: bool) -> None:
    sample = Sample(response=response, label=label, status=status)
    assert score(None, sample) == (1.0 if right else -1.0)
    assert score_binary(None, sample) == float(right)
