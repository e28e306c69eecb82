from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import GroupUid, Sample, Status
from rm_hub.math import score


def graded(response: str, label: Any, status: Status = Status.COMPLETED) -> float:
    return score(None, Sample(response=response, label=label, status=status))


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"so \boxed{\frac12}", "0.5", 1.0),
        (r"so \boxed{0.51}", r"\frac{1}{2}", 0.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{x^2+2x}", "(x+1)^2", 0.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{1,000}", 1000, 1.0),
        (r"\boxed{1.0\times10^{-34}}", r"6.63\times10^{-34}", 0.0),
        (r"\boxed{0.663\times10^{-33}}", r"6.63\times10^{-34}", 1.0),
        (r"\boxed{2\sqrt{2}\times10^{-19}}", r"1.6\sqrt{2}\times10^{-19}", 0.0),
        (r"\boxed{0.0000002}", "0.0000001", 0.0),
        (r"\boxed{[0, 0.0000002]}", "[0, 0.0000001]", 0.0),
        (r"\boxed{0.00002\%}", r"0.00001\%", 0.0),
        (r"\boxed{0.0000001}", "0.00001%", 1.0),
        (r"\boxed{0.333333}", r"\frac13", 1.0),
        (r"\boxed{0.00001}", 0.00001, 1.0),
        (r"\boxed{\infty}", r"\infty", 1.0),
        (r"\boxed{\{2,1\}}", r"$\{1,2\}$", 1.0),
        (r"\boxed{[0,1]}", "[0,1)", 0.0),
        (r"\boxed{50\%}", "0.5", 1.0),
        (r"\boxed{-1+2^{2023}}", "2^{2023}-1", 1.0),
        (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", 1.0),
        ("The answer is 1/2.", r"\boxed{\frac{1}{2}}", 1.0),
        ("x = 7\nThe answer is: $x = 5$", "x=5", 1.0),
        ("7", ["5", "7"], 1.0),
        (r"<think>\boxed{5}</think> \boxed{6}", "5", 0.0),
        (r"\boxed{5} no, \boxed{6}", "5", 0.0),
        (r"\boxed{5", "5", 0.0),
        (r"\boxed{}", "5", 0.0),
        ("", "5", 0.0),
        ("I cannot tell", "5", 0.0),
        ("3: 4", "3: 4", 1.0),
        (r"\boxed{3:4}", "3: 4", 1.0),
        (r"\boxed{4}", "3: 4", 0.0),
        ("The ratio is 3: 4", "4", 0.0),
        ("The ratio is: 3: 4", "3:4", 1.0),
        ("Answer: 5", "5", 1.0),
        ("x = 3 + 2 = 5", "x = 5", 1.0),
        ("x = 3 or x = 5", "5", 0.0),
        ("x = 1, y = 2", "2", 0.0),
        (r"\boxed{0}", r"1\,000", 0.0),
        (r"\boxed{1000}", "1 000", 1.0),
        (r"\boxed{2 1/2}", r"\frac{5}{2}", 1.0),
        (r"\boxed{1.5}", "2 1/2", 0.0),
        (r"\boxed{\text{no, it is odd}}", r"\text{no, it is odd}", 1.0),
        (r"\boxed{12}", r"\$12", 1.0),
        ("5", r"\(5\)", 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac12", 1.0),
        (r"\boxed{18}", "$18", 1.0),
        (r"\boxed{1000.5}", "$1,000.50", 1.0),
        ("The answer is **72**.", "72", 1.0),
        ("**Answer: 72**", "72", 1.0),
        ("**Answer:** 72", "72", 1.0),
        ("**The answer is $72$.**", "72", 1.0),
        ("#### 72", "72", 1.0),
        (r"\[x = 6\]", "6", 1.0),
        (r"The answer is \(6\).", "6", 1.0),
        ("Answer: `6`", "6", 1.0),
        ("#### 2**3", "23", 0.0),
        ("**2**3", "2**3", 1.0),
        (r"\boxed{72.}", "72", 1.0),
        (r"\boxed{\left\{ 1, 2 \right\}.}", r"\{1,2\}", 1.0),
        (r"\boxed{\left. x \right.}", r"\boxed{\left. x \right.}", 1.0),
        ("72", r"\boxed{72.}", 1.0),
        ("The answer is **71** or **72**.", "72", 0.0),
        (r"\boxed{__import__('os').getpid()}", "5", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics(response: str, label: Any, expected: float) -> None:
    assert graded(response, label) == expected


def test_beyond_the_limits_only_the_labels_own_text_is_right() -> None:
    assert graded(r"\boxed{9^{9^{9}}}", "9^{9^{9}}") == 1.0
    assert graded(r"\boxed{9^{9^{9^{1}}}}", "9^{9^{9}}") == 0.0
    assert graded(r"\boxed{9^{9^{9}}}", "5") == 0.0


def test_a_truncated_answer_earns_nothing_and_a_missing_label_is_an_error() -> None:
    assert graded(r"\boxed{5}", "5", Status.TRUNCATED) == 0.0
    with pytest.raises(RewardError, match="the label is None"):
        graded("5", None)


@pytest.mark.parametrize(
    "label", ["The answer is 5", "$5$ or $6$", "2 + 3 = 5\n#### 5", r"\boxed{5", "x is 5", "$", "$18 each"]
)
def test_a_label_with_words_around_an_expression_is_an_error_that_names_the_row(label: str) -> None:
    with pytest.raises(RewardError, match="data:4:0: the label is"):
        score(None, Sample(response="5", label=["5", label], uid=GroupUid("data", 4, 0)))


def test_without_the_package_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from buffer_rl.records.groups import Sample\nfrom rm_hub.math import score\n"
        "score(None, Sample(response='5', label='5'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "math-verify is not installed" in done.stderr
    assert "pip install 'buffer-rl[math]'" in done.stderr
