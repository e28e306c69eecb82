"""The page of symptoms: what it quotes are messages that the source has, and each symptom has something to do."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

from buffer_rl.errors import DataError

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SYMPTOMS = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
QUOTED = [
    line
    for box in re.findall(r"^```text\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    for line in box.splitlines()
]


def texts_of(source: str) -> list[str]:
    """The literal texts in Python source, with a line break for what is only known in a run."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append(
                "".join(
                    getattr(part, "value", "\n") if isinstance(part, ast.Constant) else "\n" for part in node.values
                )
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def is_quoted(message: str, texts: list[str]) -> bool:
    """Whether one of ``texts`` has all that the message says, in its order; ``…`` stands for anything."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    assert sum(map(len, parts)) >= 12, f"{message!r} would fit many texts"
    return any(re.search(".*".join(parts), text, re.DOTALL) for text in texts)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [
        text
        for path in sorted((ROOT / "buffer_rl").rglob("*.py"))
        for text in texts_of(path.read_text(encoding="utf-8"))
    ]


def test_every_message_that_the_page_quotes_is_in_the_source(texts: list[str]) -> None:
    assert len(QUOTED) >= 30
    assert [message for message in QUOTED if not is_quoted(message, texts)] == []


def test_an_error_names_its_section_also_after_a_process_boundary() -> None:
    error = DataError("no text", where="a.jsonl:3", hint="add one", see="docs/troubleshooting.md#the-disk-is-full")
    shown = "a.jsonl:3: no text\n  hint: add one\n  see: docs/troubleshooting.md#the-disk-is-full"
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == shown


def test_a_message_that_was_reworded_is_found() -> None:
    texts = texts_of("raise Error(f'the disk has {free} free, ' 'and no more')")
    assert is_quoted("the disk has … free, and no more", texts)
    assert not is_quoted("the disk has … left, and no more", texts)
    assert not is_quoted("and no more … the disk has", texts)


def test_there_are_twenty_symptoms_and_each_has_something_to_do() -> None:
    assert len(SYMPTOMS) >= 20
    without = [
        text.splitlines()[0] for text in SYMPTOMS if not re.search(r"`(--|buffer-rl |RUN/|export |BUFFER_RL_)", text)
    ]
    assert without == []


def test_every_symptom_is_reached_from_an_error_or_a_metric_or_quotes_its_message() -> None:
    named = "\n".join(
        path.read_text(encoding="utf-8") for path in [ROOT / "docs" / "metrics.md", *(ROOT / "buffer_rl").rglob("*.py")]
    )
    anchors = {
        text.splitlines()[0]: re.sub(r"[^\w -]", "", text.splitlines()[0].lower()).replace(" ", "-")
        for text in SYMPTOMS
    }
    unreached = [title for title, anchor in anchors.items() if f"troubleshooting.md#{anchor}" not in named]
    assert [title for title in unreached if "```text" not in next(s for s in SYMPTOMS if s.startswith(title))] == []
