from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import Sample, Status
from rm_hub.deepscaler import score, score_boxed


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
        ("1e3", "1000", 1.0),
        ("2e3", "2e3", 1.0),
        ("5 cm^2", "5", 1.0),
        ("90 degrees", "90", 1.0),
        ("Monday", "mon", 0.0),
        ("7 days", "7", 1.0),
        ("1 or 2", "1,2", 1.0),
        ("1 or 200", "1,200", 0.0),
        (r"\{1, 2\}", "1,2", 1.0),
        (r"\{1, 2\}", "(1,2)", 0.0),
        (r"x \le 3", r"x\leq3", 1.0),
        (r"x \le 3", r"x\geq3", 0.0),
        (r"(-\infty, 1)", "(-inf, 1)", 1.0),
        (r"\varnothing", r"\emptyset", 1.0),
        (r"\lvert x \rvert", "|x|", 1.0),
        ("a_1 + a_{12}", "a_{12} + a_1", 1.0),
        ("a_1 + a_2", "2a", 0.0),
        (r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1.0),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 12 \end{pmatrix}", 0.0),
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
    assert graded(r"###Response \boxed{72}", "72") == 1.0
    assert graded(r"\boxed{72} ###Response", "72") == 0.0
    with pytest.raises(RewardError, match="the label is None"):
        graded(r"</think>\boxed{72}", None)


@pytest.mark.parametrize(("text", "expected"), [(r"\boxed{72}", 1.0), (r"\boxed{72}</think> 7", 1.0), ("72", 0.0)])
def test_a_box_anywhere_counts_for_score_boxed(text: str, expected: float) -> None:
    assert score_boxed(None, Sample(response=text, label="72", status=Status.COMPLETED)) == expected
    assert score_boxed(None, Sample(response=text, label="72", status=Status.TRUNCATED)) == 0.0
