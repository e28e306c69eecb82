r"""How large a mathematical text may become when it is evaluated: bounds that are known before anything is. No reward.

``9^{9^{9^9}}`` has seven characters of content and a third of a billion digits; computer algebra computes them
eagerly, in C, where no signal interrupts it. So graders ask here first. The bounds are upper ones for what
is written with numbers, letters, brackets, powers, factorials and binomials; sums, products and integrals with
limits have no bound.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MAX_CHARACTERS = 512
MAX_TOKENS = 160  # a LaTeX parser may take time cubic in them: a second for these
MAX_DEPTH = 32
MAX_POWER_DEPTH = 3
MAX_DIGITS = 10_000  # of any number that comes up: exact arithmetic with these takes milliseconds
MAX_TERMS = 1_000  # of a polynomial that is multiplied out: a second of sympy

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+|\*\*|\S", re.DOTALL)
_SCIENTIFIC = re.compile(r"\d[eE][-+]?\d{3,}")
_UNBOUNDED = re.compile(r"\\(?:sum|prod|coprod|i{0,3}int|oint|lim|big(?:cup|cap))(?![a-zA-Z])")
_BINOMIAL = frozenset({"\\binom", "\\dbinom", "\\tbinom"})
_OPEN = {"{": "}", "(": ")", "[": "]"}
_CLOSE = frozenset(_OPEN.values())
_POWER = frozenset({"^", "**"})
# What ends a base that is no group: |9|!, 9\%^9.
_ENDS = frozenset({"|", "%", r"\%", r"\|", r"\}", r"\vert", r"\Vert", r"\rvert", r"\rVert", r"\rfloor", r"\rceil"})
_SPACING = frozenset({"\\left", "\\right", "\\big", "\\Big", "\\!", "\\,", "\\;", "\\ "})


def is_bounded(text: str) -> bool:
    """Whether evaluating and multiplying out ``text`` stays within the limits of this module."""
    if len(text) > MAX_CHARACTERS or _UNBOUNDED.search(text) or _SCIENTIFIC.search(text):
        return False
    tokens = [token for token in _TOKEN.findall(text) if token not in _SPACING]
    if len(tokens) > MAX_TOKENS:
        return False
    try:
        size = _Reader(tokens).sequence("", 0)
    except _TooLargeError:
        return False
    return size.powers <= MAX_POWER_DEPTH


class _TooLargeError(Exception):
    """Beyond a limit."""


@dataclass(frozen=True, slots=True)
class _Size:
    """digits: of the numbers multiplied together; terms: once multiplied out; powers: how deep they are nested.

    value: the number itself where nothing else is written.
    """

    digits: int = 0
    terms: int = 1
    powers: int = 0
    value: int | None = None

    def __post_init__(self) -> None:
        if self.digits > MAX_DIGITS or self.terms > MAX_TERMS:
            raise _TooLargeError

    @property
    def largest(self) -> int:
        """A bound of the number's value, where it is one."""
        if self.value is not None:
            return self.value
        if self.digits > 6:
            raise _TooLargeError
        return int(10**self.digits)


class _Reader:
    """Reads tokens from left to right; brackets and exponents by recursion."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0

    def sequence(self, closing: str, depth: int) -> _Size:
        """Everything up to ``closing``, taken as a sum of products. Mixed brackets, as of intervals, may close it."""
        if depth > MAX_DEPTH:
            raise _TooLargeError
        digits, powers, terms, product, run = 0, 0, 0, 1, _Size()
        parts: list[_Size] = []
        while (token := self._peek()) is not None and not (closing and token in _CLOSE):
            if token in {"+", "-"}:
                self._next += 1
                terms, product, run = terms + product, 1, _Size()
                continue
            is_group = token in _OPEN
            atom = self._atom(depth)
            # In \frac{9}{1}^{9} the power is of both groups: neighbours count as one base.
            base = _Size(digits=run.digits + atom.digits, terms=atom.terms, powers=max(run.powers, atom.powers))
            if token in _ENDS:
                base = _Size(digits=digits, terms=product, powers=powers)
            powered = self._powered(base if token in _ENDS or run != _Size() else atom, depth)
            digits, powers = digits + powered.digits, max(powers, powered.powers)
            product *= powered.terms
            if product > MAX_TERMS:
                raise _TooLargeError
            run = base if is_group else _Size()
            parts.append(powered)
        self._next += 1
        value = parts[0].value if len(parts) == 1 and terms == 0 else None
        return _Size(digits=digits, terms=terms + product, powers=powers, value=value)

    def _powered(self, base: _Size, depth: int) -> _Size:
        while (token := self._peek()) == "!" or token in _POWER:
            self._next += 1
            if token == "!":
                base = _factorial(base)
                continue
            while self._peek() in {"+", "-"}:
                self._next += 1
            exponent = self._atom(depth)
            if self._peek() == "!":
                _factorial(_power(base, exponent))  # 9^2! may be read as (9^2)!, too
            base = _power(base, self._powered(exponent, depth))
        return base

    def _atom(self, depth: int) -> _Size:
        token = self._peek()
        self._next += 1
        if token is None:
            return _Size()
        if token in _OPEN:
            return self.sequence(_OPEN[token], depth + 1)
        if token in _BINOMIAL:
            above, below = self._atom(depth), self._atom(depth)
            return _Size(digits=max(above.largest, below.largest))
        if token == "\\Gamma":
            return _factorial(self._atom(depth))
        if token == "\\sqrt" and self._peek() == "[":
            index, base = self._atom(depth), self._atom(depth)
            return base if index.value is not None else _power(base, index)  # by 1/9, the root is a power
        if token.isdecimal():
            value = int(token) if len(token) <= 6 else None
            return _Size(digits=len(token), value=value)
        return _Size()

    def _peek(self) -> str | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None


def _factorial(base: _Size) -> _Size:
    if base.digits == 0:
        return base  # of a letter
    n = base.largest
    return _Size(digits=n * max(1, len(str(n))), powers=base.powers)


def _power(base: _Size, exponent: _Size) -> _Size:
    times = exponent.largest if exponent.digits else 1
    terms = base.terms
    if terms > 1 and times > 1:
        terms = min(MAX_TERMS + 1, math.comb(terms + times - 1, times))
    powers = 1 + max(base.powers, exponent.powers)
    return _Size(digits=base.digits * times, terms=terms, powers=powers)
