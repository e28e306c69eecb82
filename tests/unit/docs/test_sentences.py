"""Sentences of at most 35 words in all pages, in the help of all commands and options, and in the texts of errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MOST_WORDS = 35
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "docs/evidence/*.md", "plugins/**/README.md", "*_hub/README.md")
    for path in ROOT.glob(pattern)
)
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("buffer_rl", "plugins", "rm_hub", "filter_hub")
    for path in (ROOT / folder).rglob("*.py")
)
OF_USERS = {"hint", "expected", "what", "help", "description", "epilog", "message"}
"""Arguments by keyword that a user of the command line reads, whatever is called with them."""


def sentences(page: str) -> Iterator[str]:
    """Of paragraphs and list items; no headings, tables, code blocks and pictures. Code in a line is one word, a link
    its text."""
    page = re.sub(r"^```.*?^```$|<!--.*?-->", "\n", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^(?:#|\||!\[|    ).*$", "\n", page, flags=re.MULTILINE)
    page = re.sub(r"^ *(?:[-*]|\d+\.) ", "\n\n", page, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n", page):
        text = re.sub(r"`[^`]+`", "Code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split())))
        yield from re.split(r"(?<=[.!?])[*)\"]*\s+(?=[^a-z])", text)


def too_long(page: str) -> list[str]:
    return [sentence for sentence in sentences(page) if len(sentence.split()) > MOST_WORDS]


@pytest.mark.parametrize("name", PAGES)
def test_no_sentence_of_a_page_is_too_long(name: str) -> None:
    assert too_long((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", SOURCES)
def test_no_sentence_of_a_help_text_or_an_error_is_too_long(name: str) -> None:
    found = texts_for_users((ROOT / name).read_text(encoding="utf-8"))
    assert [sentence for text in found for sentence in too_long(text)] == []


def texts_for_users(source: str) -> Iterator[str]:
    """The literal texts of errors and of help: of calls of ``…Error``, ``refuse`` and ``needs`` all arguments, of
    ``option`` the second one, of any call those of ``OF_USERS``, and what is assigned to variables with these names. A
    placeholder is one word; of a condition both texts count."""
    for node in ast.walk(ast.parse(source)):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            is_error = name.endswith("Error") or name in ("refuse", "needs")
            values = node.args if is_error else node.args[1:2] if name == "option" else []
            values = [*values, *(word.value for word in node.keywords if word.arg in OF_USERS)]
        elif isinstance(node, ast.Assign):
            values = [value for name, value in assigned(node.targets[0], node.value) if name in OF_USERS]
        for value in values:
            yield from literal_texts(value)


def assigned(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    """The variables of an assignment with their values, of ``a, b = 1, 2`` each."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [pair for each in zip(target.elts, value.elts, strict=True) for pair in assigned(*each)]
    return [(target.id, value)] if isinstance(target, ast.Name) else []


def literal_texts(value: ast.expr) -> list[str]:
    match value:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a, b in product(literal_texts(left) or ["X"], literal_texts(right) or ["X"])]
        case ast.IfExp(body=body, orelse=orelse):
            return literal_texts(body) + literal_texts(orelse)
    return []


def test_texts_of_errors_and_help_are_found_in_source() -> None:
    source = """
raise errors.ConfigError(f"a {number} b" "c", where=place, expected="d " + f"{x}", hint="e" if odd else "f")
lora_rank: int = option(0, "g", metavar="h")
parser.add_argument("--i", help="j")
print("k", file=out)
what, where, hint = f"l {number}", "m", "n"
refuse(number > 1, "o", where, hint=hint)
needs(args, "p", what, "q")
"""
    found = ["a X bc", "d X", "e", "f", "g", "j", "l X", "n", "o", "p", "q"]
    assert sorted(texts_for_users(source)) == sorted(found)
    assert sum(len(list(texts_for_users((ROOT / name).read_text(encoding="utf-8")))) for name in SOURCES) > 2_000


def test_sentences_are_counted_across_lines_without_tables_and_code() -> None:
    words = "a word " * 16 + "a word"  # 34 words
    assert too_long(f"One {words}.\nTwo {words}.") == []
    assert [len(found.split()) for found in too_long(f"One two\n{words} here. Next.")] == [37]
    assert len(too_long(f"* An item {words}\n  here\n* another")) == 1
    assert len(too_long(f"A [link of {words} words](x.md) and `one two` here.")) == 1
    assert too_long(f"`{words} {words}`: [text](a/{'b' * 9}.md).") == []
    assert (
        too_long(f"# A {words} head\n\n| {words} | {words} |\n\n```\n{words} {words}\n```\n\n    {words} {words}\n")
        == []
    )
    assert len(list(sentences("First. Second! `third` is one. (Fourth.) **Fifth.** Sixth: no seventh."))) == 6
