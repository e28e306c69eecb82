from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rm_hub.expressions import ExpressionError, equal, evaluate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("2-3-4", -5),
        ("12/3/2", 2),
        ("-2^2", -4),
        ("(-2)^2", 4),
        ("2^3^2", 512),
        ("2^{-1}", Fraction(1, 2)),
        ("3*-2", -6),
        ("2(3)", 6),
        (".5", Fraction(1, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"\frac12", Fraction(1, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)),
        (r"2\cdot 3 \times 4 \div 6", 4),
        (r"\left( 1 + 1 \right)", 2),
        ("-x", -5),
        ("2x^2", 50),
    ],
)
def test_rational_values_are_exact(text: str, value: Fraction) -> None:
    found = evaluate(text, {"x": Fraction(5)})
    assert isinstance(found, Fraction)
    assert found == value


@given(st.integers(-99, 99), st.integers(1, 99), st.integers(-99, 99), st.sampled_from("+-*"))
def test_values_agree_with_pythons_fractions(a: int, b: int, c: int, operator: str) -> None:
    expected = {"+": Fraction(a, b) + c, "-": Fraction(a, b) - c, "*": Fraction(a, b) * c}[operator]
    assert evaluate(rf"\frac{{{a}}}{{{b}}} {operator} ({c})", {}) == expected


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("(x+1)^2", "x^2+2x+1", True),
        ("(x+1)^2", "x^2+2x+2", False),
        ("xy", "yx", True),
        ("x/y", "y/x", False),
        ("x", "y", False),
        (r"\sqrt{x^2}", "x", False),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\sqrt[3]{8}", "2", True),
        (r"\sqrt[3]{-8}", "-2", True),
        (r"\sqrt[3]{x-7}", "(x-7)^{1/3}", True),
        (r"(-8)^{-2/3}", r"\frac14", True),
        (r"\sqrt{-4}", "2i", True),
        ("\N{MINUS SIGN}3x", "-3x", True),
        (r"\sin(x)^2+\cos(x)^2", "1", True),
        (r"\sin^2 x + \cos^2 x", "1", True),
        (r"\sin x^2", r"\sin(x)^2", False),
        (r"e^{i\pi}", "-1", True),
        (r"\ln(e^2)", "2", True),
        ("1/3", "0.333", False),
        (r"\sqrt{2}", "1.41421356237", True),
        (r"4\pi\cdot 10^{-12}", r"8\pi\cdot 10^{-12}", False),
        (r"4\pi\cdot 10^{-12}", r"\pi\cdot 0.000000000004", True),
        (r"2^{-40}\sqrt{2}", "0", False),
        (r"\sin(1000\pi)", "0", True),
        (r"(\sqrt{2}-1)^{10}", r"3363-2378\sqrt{2}", True),
        (r"\sqrt{2}\sqrt{2}-2", "0", True),
        ("a_2", "c_1", False),
        ("x_1 + x_2", "v_2 + v_3", False),
        ("x_1 + x_2", "x_2 + x_1", True),
        ("1/0", "1/0", False),
        ("", "", False),
        ("x +", "x", False),
        ("()", "()", False),
        ("hello", "olleh", True),  # a product of letters
        ("__import__('os')", "1", False),
    ],
)
def test_expressions_are_equal_if_their_values_are(first: str, second: str, same: bool) -> None:
    assert equal(first, second) is same


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9^9",
        "9^{99999}",
        "(((9^9)^9)^9)^9",
        "(" * 100,
        "2^" * 60 + "2",
        "-" * 250,
        r"\exp(99999)",
        "1/(1-1)",
        "9" * 300,
        "9^{250}*9^{250}",
        r"\sqrt{2}*9^{250}*9^{250}",
    ],
)
def test_what_explodes_is_an_error_at_once(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text, {})
