"""Sentences of at most 35 words in the README and in the pages of the list, which grows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MOST_WORDS = 35
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "docs/evidence/*.md", "plugins/**/README.md", "*_hub/README.md")
    for path in ROOT.glob(pattern)
)


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
