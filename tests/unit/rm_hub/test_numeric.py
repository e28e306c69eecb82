from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import GroupUid, Sample, Status
from rm_hub.numeric import MAX_CHARACTERS, MAX_DIGITS, final_number, score


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
        ("1,2345", None),
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
        (r"\boxed{1} then \boxed{2}", None),
        (r"\boxed{2} then \boxed{2.0}", 2),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"\boxed{\dfrac{-3}{4}}", Fraction(-3, 4)),
        (r"7 \boxed{x}", None),
        (r"7 \boxed{8", None),
        ("step 9\n#### 72", 72),
        ("#### 72\nThat is 7 more.", 72),
        ("#### 72 of 80", None),
        ("#### 1\n#### 1,000", None),
        ("#### 1000\n#### 1,000", 1000),
        ("7 ####", None),
        ("Altogether 48 + 24 = 72.\n72", 72),
        ("Total: 72.\n$72", 72),
        ("Step 3:\n72", 72),
        ("She has 24.\n72", 72),
        ("48 +\n72", None),
        ("#### Solution\nThe answer is 72.", 72),
        ("#### Final answer\n72", 72),
        ("#### Final Answer:\n\n**72**", 72),
        ("#### Step 1\n48 + 24\n\nAnswer: 72", 72),
        ("#### 1. Total\n48 + 24 = 72", 72),
        ("####\n72", 72),
        ("**#### 72**", 72),
        ("#### **$72**", 72),
        (r"#### \$72", 72),
        ("#### -72\n#### Check\n5", -72),
        ("#### 71\n#### 2. Check\n72", 71),
    ],
)
def test_the_final_number_of_a_text(text: str, expected: Any) -> None:
    assert final_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"1{,}000", 1000),
        (r"12\,345\,678.5", Fraction(123456785, 10)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\frac12", Fraction(1, 2)),
        (r"\$18", 18),
        ("-$5", -5),
        (r"50\%", 50),
        (r"90^\circ", 90),
        (r"5\,\text{cm}", 5),
        (r"18 \text{ m}^2", 18),
        ("$72$", 72),
        ("**72.**", 72),
        ("\N{MINUS SIGN}3", -3),
        (r"2\sqrt{3}", None),
        ("x^2", None),
        ("x = 5", 5),
        ("x = y = 5", None),
        ("xy = 5", None),
        ("2x = 5", None),
        (r"72\,km", 72),
        ("72 cm^2", 72),
        (r"72\,k", None),
        (r"72\,kmx", None),
        (r"72\,\mathrm{m^2}", 72),
        (r"72\,\mathrm{kg\,m/s^{2}}", 72),
        (r"72\degree", 72),
        (r"20^\circ\text{C}", 20),
        (r"\text{72 clips}", 72),
        (r"x = \text{$72 each}", 72),
        (r"\text{72 million}", None),
        (r"\text{72 or 73}", None),
        (r"72\mathrm{^2}", None),
        (r"72\mathrm{m^{2} million}", None),
        (r"2\frac{1}{2}", None),
        (r"3\times10^5", None),
        (r"3 \text{ million}", None),
        (r"2\text{3}", None),
        ("3 or 5", None),
        ("3, 5", None),
        ("3: 4", None),
        ("5-3", None),
        ("1,00", None),
        ("1 000", None),
        ("72 apples", None),
        ("5\n6", None),
    ],
)
def test_a_box_and_a_label_are_one_number_as_a_whole_or_none(text: str, expected: Any) -> None:
    assert final_number(f"by 7, \\boxed{{{text}}} of 8") == expected
    for label in (text, f"6 + 1\n\\boxed{{{text}}}", *([f"6 + 1 = 7\n#### {text}"] if "\n" not in text else [])):
        if expected is None:
            with pytest.raises(RewardError, match=r"data:4:0: the label is .*\n.*after its last ####"):
                score(None, Sample(response="72", label=label, uid=GroupUid("data", 4, 0)))
        else:
            assert graded(f"\\boxed{{{expected}}}", label) == 1.0


@pytest.mark.parametrize(
    "part",
    [
        "x^2", "x^{2}", r"2\sqrt{3}", r"2\sqrt 3", r"\sqrt3", r"\frac{x}{2}", "x/2", r"\pi/4", r"2\pi", "2x", "3+4i",
        "3 + x", "x + 3", "48*24", r"3\times10^5", r"3 \cdot 5", "2(x", "3:4", "12:30", "1,00", "1{,}00", "1 000",
        "2 1/2", "1.2.3", "12/05/2023", "3 million", "2\N{VULGAR FRACTION ONE HALF}", "10\N{SUPERSCRIPT TWO}",
    ],
)  # fmt: skip
def test_a_part_of_an_expression_is_no_number_and_no_other_is_tried(part: str) -> None:
    assert final_number(f"From 7 it follows that it is {part}.") is None


@pytest.mark.parametrize(
    "text",
    [
        "the area is 72 m^2.", "72 cm^{2}", r"72\text{ m}^2", "72 g of CO2", "72 for x_1", "72km/h", "$72/hour", "*72*",
        "**72**.", "Step 3: 72", "answer:72", "=72.", "x = 3, y = 72", r"x\approx72", r"$\mathbf{72}$", "72!", "[72]",
        r"72^\circ", r"72\degree", r"\text{72 clips}", r"72\,\mathrm{m^2}",
    ],
)  # fmt: skip
def test_punctuation_units_and_names_may_stand_around_the_last_number(text: str) -> None:
    assert final_number(text) == 72


def test_a_number_that_begins_before_the_characters_that_are_read_is_no_number() -> None:
    assert final_number("172" + "!" * (MAX_CHARACTERS - 2)) is None
    assert final_number("so 172 " + "!" * (MAX_CHARACTERS - 20)) == 172


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
        (r"\boxed{72}? #### 72?</think>No, 71.", 72, 0.0),
        (r"\boxed{71}?</think>It is 72.", 72, 1.0),
    ],
)
def test_whole_numbers_must_be_equal_and_others_close(response: str, label: Any, expected: float) -> None:
    assert graded(response, label) == expected


def test_a_truncated_answer_earns_nothing_because_its_number_may_be_cut() -> None:
    assert graded("the answer is 72", 72, Status.TRUNCATED) == 0.0


@pytest.mark.parametrize("label", [None, True, "no number", "It is 72", "", [72], float("nan"), "1" * 65])
def test_a_label_without_a_number_is_an_error_and_not_a_zero(label: Any) -> None:
    with pytest.raises(RewardError, match="the label is"):
        graded("72", label)


def test_huge_numbers_cost_nothing_and_earn_nothing() -> None:
    assert final_number("9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    assert final_number("9" * (MAX_DIGITS + 1)) is None
    for attack in ("9" * 1_000_000, "1e" + "9" * 1_000_000, "1," * 500_000, "{" * 1_000_000, r"\boxed{" * 200_000):
        assert graded(attack, 72) == 0.0
    for text in ("####" + " " * 500_000 + "x", "#" * 1_000_000, "####**" * 150_000, "#### 1." + " " * 500_000):
        assert graded(text, 72) == 0.0
    for text in (r"\mathrm{" + "m^2" * 1000, r"\text{7" * 500, r"72\mathrm{" + "a" * 4000, r"\text{" + "7." * 2000):
        assert graded(f"\\boxed{{{text}}}", 72) == 0.0
        assert final_number(text + "x") in (None, 7, 72)
    for space in (" ", "{,}", "\\,", "a"):  # a grammar with many ways to divide what follows
        assert graded(f"\\boxed{{72{space * 1000}x}}", 72) == 0.0
