"""Tools of a model that calculates: plain functions. Their signatures and docstrings are what the model is told."""

from __future__ import annotations


def add(a: int, b: int) -> int:
    """The sum of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """The difference of two numbers.

    Args:
        a: The first number.
        b: The number that is taken away.
    """
    return a - b


def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


TOOLS = (add, subtract, multiply)
"""``--tools-path calculator.py:TOOLS``: a reference may name one function, or several."""
