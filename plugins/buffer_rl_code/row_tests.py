"""Tests of a row, as its metadata hold them: what a candidate is given, and what is expected of it."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl_code.driver import packed, unpacked

MAX_TESTS = 200
SPARE = 4  # bytes of an answer as the driver writes it, for each character of what is expected
EXPECTED = (
    'metadata {"tests": [...]}: pairs {"input": text, "output": text}, or calls {"fn": name, "args": [...], '
    '"expected": value}, or texts "assert fn(...) == value", all of one form'
)


class _WrongTestError(Exception):
    """A test that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tests:
    """task: what the driver is given, without the code. expected: the right answers, in order, which stay outside.
    json: they are JSON, to which a tuple is a list.

    Example: ``Tests(task={"inputs": ["1 2\\n"]}, expected=["3\\n"])``.
    """

    task: Mapping[str, Any]
    expected: Sequence[Any]
    json: bool = False

    @property
    def limit(self) -> int:
        """Bytes of one answer: enough for all that is expected, and so it says nothing of a single test."""
        return max(1 << 18, SPARE * len(ascii(self.expected)))

    def is_right(self, number: int, answer: Mapping[str, Any]) -> bool:
        """Whether the answer to test ``number`` is the expected one: text without white space at the ends of lines and
        of the whole; values as Python compares them, a NaN with a NaN too."""
        expected = self.expected[number]
        if "inputs" in self.task:
            output = answer.get("stdout")
            return isinstance(output, str) and _lines(output) == _lines(expected)
        if "value" not in answer:
            return False
        try:
            value = unpacked(answer["value"])
            return _same(_with_lists(value) if self.json else value, expected)
        except (TypeError, ValueError, KeyError, RecursionError, OverflowError):  # what the candidate has made up
            return False


def tests_of(metadata: Mapping[str, Any], *, where: str) -> Tests:
    """The tests under ``tests``. Raises RewardError if there are none, or one cannot be read."""
    tests = metadata.get("tests")
    if not isinstance(tests, list) or not 0 < len(tests) <= MAX_TESTS:
        raise RewardError(f"the row has no list of 1 to {MAX_TESTS} tests", where=where, expected=EXPECTED)
    if all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in tests):
        if all(isinstance(test[name], str) for test in tests for name in ("input", "output")):
            inputs, outputs = ([test[name] for test in tests] for name in ("input", "output"))
            return Tests(task={"inputs": inputs}, expected=outputs)
        raise RewardError("input and output of a test are not text", where=where, expected=EXPECTED)
    calls, expected = [], []
    for number, test in enumerate(tests):
        try:
            call, value = _of_assert(test) if isinstance(test, str) else _of_call(test)
            calls.append(call)
            expected.append(value)
        except (_WrongTestError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise RewardError(f"test {number} cannot be read: {error}", where=where, expected=EXPECTED) from error
    return Tests(task={"calls": calls}, expected=expected, json=not any(isinstance(test, str) for test in tests))


def _of_call(test: object) -> tuple[dict[str, Any], Any]:
    if not isinstance(test, Mapping) or not isinstance(test.get("fn"), str) or "expected" not in test:
        raise _WrongTestError(f"{test!r:.120}")
    args, kwargs = test.get("args", []), test.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, Mapping):
        raise _WrongTestError("args is no list, or kwargs no mapping")
    return _call(test["fn"], args, kwargs), test["expected"]


def _of_assert(text: str) -> tuple[dict[str, Any], Any]:
    """Of ``assert fn(...) == value`` with literal arguments and value; nothing of it is run."""
    body = ast.parse(text.strip()).body
    found = body[0].test if len(body) == 1 and isinstance(body[0], ast.Assert) else None
    if not (isinstance(found, ast.Compare) and len(found.ops) == 1 and isinstance(found.ops[0], ast.Eq)):
        raise _WrongTestError(f"{text!r:.120} is no assert fn(...) == value")
    call, value = found.left, found.comparators[0]
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        raise _WrongTestError(f"{text!r:.120} calls no function by its name")
    if not all(keyword.arg for keyword in call.keywords):
        raise _WrongTestError(f"{text!r:.120} has **arguments")
    args = [_literal(arg) for arg in call.args]
    kwargs = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    return _call(call.func.id, args, kwargs), _literal(value)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "set":
        return set(*(_literal(arg) for arg in node.args))
    return ast.literal_eval(node)


def _call(fn: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    packed_kwargs = {name: packed(item) for name, item in kwargs.items()}
    return {"fn": fn, "args": [packed(item) for item in args], "kwargs": packed_kwargs}


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _with_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_with_lists(item) for item in value]
    return {key: _with_lists(item) for key, item in value.items()} if isinstance(value, dict) else value


def _same(answer: Any, expected: Any) -> bool:
    are_nan = all(isinstance(value, float) and math.isnan(value) for value in (answer, expected))
    return are_nan or bool(answer == expected)
