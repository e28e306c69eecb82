r"""Reads and compares small mathematical expressions without computer algebra and without ``eval``. No reward itself.

Two expressions are equal if they have equal values wherever both are tried: exactly, as fractions, where only rational
numbers occur, else to ``TOLERANCE`` of their size. A polynomial identity that holds at random points holds with a
probability near 1 (Schwartz 1980, Fast probabilistic algorithms for verification of polynomial identities, J. ACM
27(4), section 2). No number grows beyond ``MAX_BITS``, so that every comparison ends within milliseconds.
"""

from __future__ import annotations

import cmath
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

MAX_CHARACTERS = 256
MAX_DEPTH = 32
MAX_BITS = 1024
TOLERANCE = 1e-9
NOISE = 1e-13
"""What rounding leaves of terms that cancel, relative to the largest of them."""

Value = Fraction | complex

_IGNORED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:! ]|\\displaystyle|\s+")
_MIXED = re.compile(r"(?<![\w.}])(\d+)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_NAME = re.compile(r"sqrt|sin|cos|tan|exp|log|ln|pi|[a-zA-Z]")
_SUBSCRIPT = re.compile(r"_(?:(\w)|\{(\w{1,8})\})")
_FUNCTIONS = {"sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "exp": cmath.exp, "ln": cmath.log, "log": cmath.log}
_CONSTANTS: Mapping[str, Value] = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}
_GREEK = frozenset({"alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "phi", "omega"})
# Fixed, of both signs, not whole, and neither small nor in a simple ratio to each other.
_POINTS = tuple(Fraction(n, 997) for n in (1409, -2203, 571, -743, 3001, 1777, -307, 2593, -1291))
_NUM_TRIALS = 4


class ExpressionError(ValueError):
    """The text is no expression of the kind read here, or its value is too large or undefined."""


def equal(first: str, second: str) -> bool:
    """Whether two expressions have the same value; False if one cannot be read or is defined nowhere."""
    trials = 0
    for shift in range(_NUM_TRIALS):
        one, other = _value(first, shift), _value(second, shift)
        if one is None and other is None:
            continue
        if one is None or other is None or not _close(*one, *other):
            return False
        trials += 1
    return trials > 0


def evaluate(text: str, variables: Mapping[str, Value]) -> Value:
    """The value of an expression. Raises ExpressionError."""
    return _Reader(text, variables).whole()


class _EveryLetter(dict[str, Value]):
    """Gives each variable a point of its own, which depends on its name alone."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self._shift = shift

    def __missing__(self, name: str) -> Value:
        number = int.from_bytes(hashlib.sha256(f"{name} {self._shift}".encode()).digest())
        return _POINTS[number % len(_POINTS)] + Fraction(number % 89, 1009)


def _value(text: str, shift: int) -> tuple[Value, float] | None:
    """The value of an expression, and the largest number that is added, or given to a function; None if it has none."""
    try:
        reader = _Reader(text, _EveryLetter(shift))
        return reader.whole(), reader.largest
    except ExpressionError:
        return None


def _close(one: Value, largest: float, other: Value, other_largest: float) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    size = max(abs(complex(one)), abs(complex(other)))
    return abs(complex(one) - complex(other)) <= max(TOLERANCE * size, NOISE * max(largest, other_largest))


class _Reader:
    """Recursive descent: sum, product (also of neighbours), power, atom. Computes while it reads."""

    def __init__(self, text: str, variables: Mapping[str, Value]) -> None:
        self._text = _IGNORED.sub("", _MIXED.sub(r"(\1+\2/\3)", text.replace("\N{MINUS SIGN}", "-")))
        if not self._text or len(self._text) > MAX_CHARACTERS:
            raise ExpressionError("empty or too long")
        self._at = 0
        self._depth = 0
        self._variables = variables
        self.largest = 0.0

    def whole(self) -> Value:
        try:
            value = self._sum()
        except (ZeroDivisionError, OverflowError) as error:
            raise ExpressionError(str(error)) from error
        if self._at < len(self._text):
            raise ExpressionError(f"not understood: {self._text[self._at :]!r:.40}")
        return value

    def _sum(self) -> Value:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError("nested too deeply")
        value = self._product()
        while sign := self._taken("+", "-"):
            term = self._product()
            self.largest = max(self.largest, abs(complex(value)), abs(complex(term)))
            value = _checked(value + term if sign == "+" else value - term)
        self._depth -= 1
        return value

    def _product(self) -> Value:
        if sign := self._taken("+", "-"):
            value = self._product()
            return -value if sign == "-" else value
        value = self._power()
        while True:
            if self._taken("*", "\\cdot", "\\times"):
                value = _checked(value * self._signed_power())
            elif self._taken("/", "\\div"):
                value = _checked(value / self._signed_power())
            elif self._at < len(self._text) and re.match(r"[\w.({\\]", self._text[self._at]):
                value = _checked(value * self._power())
            else:
                return value

    def _signed_power(self) -> Value:
        return -self._power() if self._taken("-") else self._power()

    def _power(self) -> Value:
        base = self._atom()
        if not self._taken("^", "**"):
            return base
        return _raised(base, self._signed_power())

    def _atom(self) -> Value:
        for opening, closing in (("(", ")"), ("{", "}"), ("[", "]")):
            if self._taken(opening):
                value = self._sum()
                if not self._taken(closing):
                    raise ExpressionError(f"{closing} is missing")
                return value
        if number := _NUMBER.match(self._text, self._at):
            self._at = number.end()
            return _checked(Fraction(number.group()))
        command = _COMMAND.match(self._text, self._at)
        name = command.group()[1:] if command else self._letters()
        if command:
            self._at = command.end()
        if name in {"frac", "dfrac", "tfrac"}:
            above = self._argument()
            return _checked(above / self._argument())
        if name == "sqrt":
            index = self._atom() if self._text.startswith("[", self._at) else Fraction(2)
            return _raised(self._argument(), 1 / index)
        if name in _FUNCTIONS:
            return self._applied(_FUNCTIONS[name])
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if len(name) == 1 or name in _GREEK:
            subscript = _SUBSCRIPT.match(self._text, self._at)
            self._at += len(subscript.group()) if subscript else 0
            return self._variables[name + (subscript[1] or subscript[2] if subscript else "")]
        raise ExpressionError(f"not understood: {name!r:.40}")

    def _applied(self, function: Callable[[complex], complex]) -> Value:
        r"""``\sin(x)^2`` and ``\sin^2 x`` are powers of the sine, ``\sin x^2`` is the sine of a power."""
        exponent = self._atom() if self._taken("^") else Fraction(1)
        bracket = self._text.startswith(("(", "{"), self._at)
        argument = self._atom() if bracket else self._power()
        self.largest = max(self.largest, 1.0, abs(complex(argument)))
        return _raised(_checked(function(complex(argument))), exponent)

    def _argument(self) -> Value:
        r"""What follows ``\frac`` or ``\sqrt``: a group, or a single digit or letter."""
        character = self._text[self._at : self._at + 1]
        if character.isdecimal():
            self._at += 1
            return Fraction(int(character))
        return self._atom()

    def _letters(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise ExpressionError("an operand is missing")
        self._at = found.end()
        return found.group()

    def _taken(self, *words: str) -> str:
        for word in words:
            if self._text.startswith(word, self._at) and not (word == "*" and self._text.startswith("**", self._at)):
                self._at += len(word)
                return word
        return ""


def _raised(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        if exponent.denominator == 1:
            if _bits(base) * abs(exponent.numerator) > MAX_BITS:
                raise ExpressionError("too large")
            return _checked(base**exponent.numerator)
        if exponent == Fraction(1, 2) and base >= 0:
            root = Fraction(math.isqrt(base.numerator), math.isqrt(base.denominator))
            if root * root == base:
                return root
        if base < 0 and exponent.denominator % 2:  # the root that is real, such as -2 of -8
            return _raised(-base, exponent) * (-1 if exponent.numerator % 2 else 1)
    return _checked(complex(base) ** complex(exponent))


def _checked(value: Value) -> Value:
    if isinstance(value, Fraction):
        if _bits(value) > MAX_BITS:
            raise ExpressionError("too large")
        return value
    if not cmath.isfinite(value):
        raise ExpressionError("not finite")
    return complex(value)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
