from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.errors import RewardError
from buffer_rl.types import Sample, Status
from rm_hub.deepscaler import score


def graded(response: str, label: Any, status: Status = Status.COMPLETED) -> float:
    return score(None, Sample(response=response, label=label, status=status))


@pytest.mark.parametrize(
    ("boxed", "label", "expected"),
    [
        ("72", "72", 1.0),
        ("72", 72, 1.0),
        ("72.0", "72", 1.0),
        ("73", "72", 0.0),
        ("1,000", "1000", 1.0),
        (r"\$1{,}000", "1000", 1.0),
        ("x = 5", "5", 1.0),
        (r"5 \text{ cm}", "5", 1.0),
        (r"72\ \text{hours}", "72", 1.0),
        ("72", r"72\ \text{hours}", 1.0),
        (r"15\ \mathrm{cm}", "15", 1.0),
        ("15", r"15\ \mathrm{cm}", 1.0),
        (r"15~\text{cm}", "15", 1.0),
        ("15", r"15~\text{cm}", 1.0),
        (r"15\text{ cm}^2", "15", 1.0),
        ("15", r"15\mbox{ cm}^2", 1.0),
        (r"15\mbox{ cm}^{2}", "225", 0.0),
        (r"15\,\mathrm{m^{2}}", "15", 1.0),
        (r"\text{x}^2", "x", 0.0),
        (r"1~000\ \text{m}", "1000", 1.0),
        (r"3\ 4", "34", 0.0),
        (r"1\ \text{or}\ 2", "12", 0.0),
        (r"90^\circ", "90", 1.0),
        (r"\text{East}", "east", 1.0),
        (r"\dfrac{3}{4}", r"\frac{3}{4}", 1.0),
        ("3/4", r"\frac{3}{4}", 1.0),
        ("0.75", r"\frac{3}{4}", 1.0),
        (r"\frac{6}{8}", r"\frac{3}{4}", 0.0),
        (r"\frac{2}{4}", r"\frac12", 0.0),
        (r"\dfrac24", r"\frac{1}{2}", 0.0),
        ("2/4", r"\frac1{2}", 0.0),
        (r"\frac12", "1/2", 1.0),
        (r"\frac{}{2}", r"\frac{1}{2}", 0.0),
        (r"\frac x2", r"\frac{x}{2}", 1.0),
        (r"\frac{1}{2}", r"\frac24", 0.0),
        ("2 1/2", r"\frac{5}{2}", 1.0),
        ("2 1/2", r"\frac{21}{2}", 0.0),
        ("-2 1/2", r"-\frac{5}{2}", 1.0),
        ("3 4", "34", 0.0),
        (r"3\,4", "34", 0.0),
        ("(1234)", "(1, 234)", 0.0),
        ("(1,234)", "(1, 234)", 1.0),
        (r"1\text{ or }2", "12", 0.0),
        (r"1 \text{ or } 200", "1200", 0.0),
        ("3", r"3 \text{ million}", 0.0),
        (r"3\text{ million}", "3 million", 1.0),
        ("1 000", "1000", 1.0),
        (r"-\frac{3}{4}", r"\frac{-3}{4}", 1.0),
        (r"-\frac{3}{4}", r"\frac{3}{4}", 0.0),
        ("1+1", "2", 0.0),
        (r"(x+1)^2", "x^2+2x+1", 1.0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
        ("(1, 2)", "(1,2)", 1.0),
        ("(1, 0.5)", r"(1, \frac{1}{2})", 1.0),
        ("(2, 1)", "(1, 2)", 0.0),
        ("(1, 2]", "(1, 2)", 0.0),
        ("(1, 2, 3)", "(1, 2)", 0.0),
        ("72", r"\boxed{72}", 1.0),
        ("72", ["71", "72"], 1.0),
        ("", "72", 0.0),
    ],
)
def test_the_boxed_answer_equals_the_label_as_text_or_in_value(boxed: str, label: Any, expected: float) -> None:
    assert graded(f"thinking</think> so \\boxed{{{boxed}}}", label) == expected


def test_without_the_end_of_the_reasoning_a_box_or_an_end_there_is_no_answer() -> None:
    assert graded(r"\boxed{72}", "72") == 0.0
    assert graded(r"\boxed{72}</think> 72", "72") == 0.0
    assert graded(r"</think>\boxed{72}", "72", Status.TRUNCATED) == 0.0
    with pytest.raises(RewardError, match="the label is None"):
        graded(r"</think>\boxed{72}", None)
