from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.errors import RewardError
from buffer_rl.types import Sample, Status
from rm_hub.numeric import MAX_DIGITS, final_number, score


def graded(response: str, label: Any, status: Status = Status.COMPLETED) -> float:
    return score(None, Sample(response=response, label=label, status=status))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("72", 72),
        ("-72", -72),
        ("+72", 72),
        ("The answer is 72.", 72),
        ("48/2 = 24, 48+24 = 72", 72),
        ("it costs $1,234,567.50 in all", Fraction("1234567.5")),
        ("1,2345", 2345),
        ("5-3", 3),
        ("x = (2)-3", 3),
        ("x = -3", -3),
        ("1/2", Fraction(1, 2)),
        ("1/0", None),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("6.02e23", Fraction(602) * 10**21),
        ("1e-3", Fraction(1, 1000)),
        ("1e999999999", None),
        ("18km", 18),
        ("variable x2 only", None),
        ("none", None),
        ("", None),
        (r"so \boxed{42} and 7", 42),
        (r"\boxed{1} then \boxed{2}", 2),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"\boxed{\dfrac{-3}{4}}", Fraction(-3, 4)),
        (r"7 \boxed{x}", None),
        (r"7 \boxed{8", None),
        ("step 9\n#### 72", 72),
        ("#### 1\n#### 1,000", 1000),
        ("7 ####", None),
    ],
)
def test_the_final_number_of_a_text(text: str, expected: Any) -> None:
    assert final_number(text) == expected


@given(st.integers(-(10**30), 10**30))
def test_every_integer_is_read_back_with_and_without_separators(number: int) -> None:
    assert final_number(f"so it is {number}.") == number
    assert final_number(f"so it is {number:,}.") == number


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e50, max_value=1e50))
def test_a_float_is_graded_right_against_itself(number: float) -> None:
    if abs(number) > 1e-40 or number == 0:
        assert graded(repr(number), number) == 1.0


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("72", 72, 1.0),
        ("72.0", 72, 1.0),
        ("72", "Natalia sold 48/2 = 24 clips.\n#### 72", 1.0),
        ("1000001", 1000000, 0.0),
        ("0.3333333", "1/3", 1.0),
        ("0.333", "1/3", 0.0),
        ("-72", 72, 0.0),
        ("0", 0, 1.0),
        ("1e-30", 0, 0.0),
        ("172", 72, 0.0),
        ("I cannot tell", 72, 0.0),
    ],
)
def test_whole_numbers_must_be_equal_and_others_close(response: str, label: Any, expected: float) -> None:
    assert graded(response, label) == expected


def test_a_truncated_answer_earns_nothing_because_its_number_may_be_cut() -> None:
    assert graded("the answer is 72", 72, Status.TRUNCATED) == 0.0


@pytest.mark.parametrize("label", [None, True, "no number", "", [72], float("nan"), float("inf"), "1" * 65])
def test_a_label_without_a_number_is_an_error_and_not_a_zero(label: Any) -> None:
    with pytest.raises(RewardError, match="the label is"):
        graded("72", label)


def test_huge_numbers_cost_nothing_and_earn_nothing() -> None:
    assert final_number("9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    assert final_number("9" * (MAX_DIGITS + 1)) is None
    for attack in ("9" * 1_000_000, "1e" + "9" * 1_000_000, "1," * 500_000, "{" * 1_000_000, r"\boxed{" * 200_000):
        assert graded(attack, 72) == 0.0
