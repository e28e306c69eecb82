from __future__ import annotations

import pytest

from rm_hub.bounds import MAX_CHARACTERS, MAX_TOKENS, is_bounded


@pytest.mark.parametrize(
    "text",
    [
        "",
        "72",
        "9" * 500,
        r"\frac{1}{2}",
        r"2^{2023}-1",
        "10^{100}",
        "2^{3^4}",
        r"e^{-\frac{x^2}{2}}",
        r"\{1, 2, 3\}",
        "[0, 1)",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        "(x + 1)^{10}",
        "100!",
        "n!!!",
        "9^",
        r"\binom{100}{50}",
        "x^{99} + 3x^{98} + 1",
        r"\sqrt[3]{12}",
        "1e-9",
        "|x - 3|^2",
        "|-3|!",
        r"2|x|^{99}",
        r"\frac{10!}{4!6!}",
        r"\sqrt[n]{9}",
        r"\sqrt[2n+1]{x + 1}",
        r"\Gamma(\frac{1}{4})",
        r"50\%",
        r"\{x | x^2 > 3\}",
    ],
)
def test_ordinary_answers_are_within_the_limits(text: str) -> None:
    assert is_bounded(text)


@pytest.mark.parametrize(
    "text",
    [
        "9" * (MAX_CHARACTERS + 1),
        "a" * MAX_TOKENS + "!",
        "9^{9^{9^9}}",
        "9**9**9**9",
        "9^{9^9}",
        r"9^\,{9^9}",
        "9^{99999999}",
        "9^-99999",
        "(x + 1)^{999999}",
        "(9)^{(9)^{(9)}}",
        r"9^{9\cdot 9^{9}}",
        "9^{9^{9 + x - x}}",  # x - x is taken away before the power is computed
        r"{\left(10^{999}\right)}^{999}",
        r"\frac{99999}{1}^{5000}",
        "((((2^{19})^{19})^{19})^{19})",
        "99999!",
        "9!!!",
        r"2^{99999!}",
        "9999999^{1}!",
        r"9999999\%!",
        "|9999999|!",
        r"\left|9999999\right|!",
        r"\lfloor 99.5 \rfloor^{99999}",
        r"\Gamma(9999999)",
        r"\sqrt[\frac{1}{99999999}]{9}",
        r"\sqrt[10^{-9}]{9}",
        r"\binom{999999}{500000}",
        "(x + y + z + w)^{99}",
        "(x+1)(x+2)(x+3)(x+4)(x+5)(x+6)(x+7)(x+8)(x+9)(y+1)(y+2)",
        "((x + 1)^{30})^{50}(y + 1)^{30}",
        "e^{e^{e^{e^{9}}}}",
        r"\sum_{i=1}^{10} i",
        r"\int_0^1 x dx",
        "1e999999",
        "{" * 100,
        "(" * 40 + "1" + ")" * 40,
    ],
)
def test_what_would_explode_is_refused_by_its_text_alone(text: str) -> None:
    assert not is_bounded(text)
