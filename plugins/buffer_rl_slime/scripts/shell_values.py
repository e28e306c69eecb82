"""Values of a script that is read and not run: texts that may hold what only the shell could know.

What comes from the environment, or from a command's output, is a mark inside the text.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

_BEGIN_UNSET, _BEGIN_COMPUTED, _END = "\ue000", "\ue001", "\ue002"  # private use: no script has them
_UNSET = re.compile(f"{_BEGIN_UNSET}([^{_END}]*){_END}")
_MARK = re.compile(f"[{_BEGIN_UNSET}{_BEGIN_COMPUTED}]([^{_END}]*){_END}")


def unset(name: str) -> str:
    """The value of a variable that the script does not set."""
    return f"{_BEGIN_UNSET}{name}{_END}"


def computed(name: str) -> str:
    """The value of a variable that depends on a command's output."""
    return f"{_BEGIN_COMPUTED}{name}{_END}"


def is_computed(text: str) -> bool:
    """Whether a command's output is in the text."""
    return _BEGIN_COMPUTED in text


def is_mark(text: str) -> bool:
    """Whether the text is one unknown value and nothing else."""
    return _MARK.fullmatch(text) is not None


def marks_of(text: str) -> list[str]:
    """The names of the variables whose values are not known, in the order of the text."""
    return _MARK.findall(text)


def shown(text: str) -> str:
    """The text for people: ``${NAME}`` where a value is not known."""
    return _MARK.sub(r"${\1}", text)


def with_placeholders(text: str) -> str:
    """The text for a YAML file of options: ``${env:NAME}``, and ``$${`` for a plain ``${``."""
    return _UNSET.sub(r"${env:\1}", text.replace("${", "$${"))


def as_run(text: str) -> str:
    """The text as a shell without these environment variables has it: they are empty."""
    return _UNSET.sub("", text)


_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: _quotient(a, b),
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _quotient(a: int, b: int) -> int:
    """``a / b`` towards zero, as the shell divides."""
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def arithmetic(text: str) -> int | None:
    """The value of an expression of whole numbers, ``+ - * / %``, comparisons and brackets; None for any other."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        return int(_COMPARED[type(node.ops[0])](_evaluate(node.left), _evaluate(node.comparators[0])))
    raise ValueError(f"{ast.dump(node)} is no arithmetic that is known here")


_NUMERIC = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


def holds(words: Sequence[str]) -> bool | None:
    """Whether the test ``[ words ]`` holds; None where that depends on files, on commands, or is not understood."""
    for symbol, decided in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if symbol in words:
            at = list(words).index(symbol)
            sides = (holds(words[:at]), holds(words[at + 1 :]))
            return decided if decided in sides else None if None in sides else not decided
    if words and words[0] == "!":
        inner = holds(words[1:])
        return None if inner is None else not inner
    if any(is_computed(word) for word in words):
        return None
    texts = [as_run(word) for word in words]
    if len(texts) <= 1:
        return bool(texts and texts[0])
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return (texts[1] == "") == (texts[0] == "-z")
    if len(texts) != 3:
        return None
    left, symbol, right = texts
    if symbol in ("=", "==", "!="):
        return fnmatchcase(left, right) == (symbol != "!=")
    value = arithmetic(f"({left}) {_NUMERIC[symbol]} ({right})") if symbol in _NUMERIC else None
    return None if value is None else bool(value)


def removed(value: str, operation: str, pattern: str) -> str:
    """``${value%pattern}`` and its like: without the shortest or longest match at the end (%) or beginning (#)."""
    ends = range(len(value) + 1)
    if operation.startswith("%"):
        found = [end for end in ends if fnmatchcase(value[end:], pattern)]
        return value[: (max(found) if operation == "%" else min(found))] if found else value
    found = [end for end in ends if fnmatchcase(value[:end], pattern)]
    return value[(min(found) if operation == "#" else max(found)) :] if found else value
