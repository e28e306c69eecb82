"""Bad data files: told with file and line and exit status 2 before anything is started or made."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from buffer_rl.cli import main
from buffer_rl.data.jsonl import MAX_DEPTH, MAX_LINE_BYTES

GOOD = b'{"prompt": "a", "label": "b"}\n'
MANY = b"".join(b'{"prompt": "question %d", "label": "%d"}\n' % (number * 7919, number) for number in range(5000))


def deep(levels: int) -> bytes:
    """A row whose metadata make it ``levels`` levels deep."""
    return b'{"prompt": "a", "metadata": {"x": ' + b"[" * (levels - 2) + b"]" * (levels - 2) + b"}}\n"


def folder_without_data(path: Path) -> None:
    path.mkdir()
    (path / "readme.txt").write_text("nothing")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


# Name of the file, its content (or what makes it), where it is bad, and words of the reason.
KINDS: dict[str, tuple[str, bytes | Callable[[Path], None], str, str]] = {
    "broken JSON": ("d.jsonl", GOOD * 2 + b'{"prompt": "a",\n', ":3", "invalid JSON"),
    "no UTF-8": ("d.jsonl", GOOD + b'{"prompt": "\xff"}\n', ":2", "invalid UTF-8 at byte 13"),
    "UTF-16": ("d.jsonl", GOOD.decode().encode("utf-16"), "", "this looks like text in UTF-16"),
    "a JSON array": ("d.json", b"[" + GOOD.strip() + b"]", "", "this looks like a JSON array"),
    "gzip without its suffix": ("d.jsonl", gzip.compress(GOOD), "", "this looks like a gzip file"),
    "a pointer in place of Parquet": ("d.parquet", b"version https://git-lfs.github.com/spec/v1", "", "Git LFS"),
    "a NUL in a line": ("d.jsonl", GOOD + b'{"prompt": "\0"}\n', ":2", "invalid JSON"),
    "broken after a byte order mark and blank lines": ("d.jsonl", b"\xef\xbb\xbf\n \n" + GOOD + b"\n{\n", ":5", "JSON"),
    "only blank lines": ("d.jsonl", b"\n \t\n\r\n", "", "no rows"),
    "an empty file": ("d.jsonl", b"", "", "no rows"),
    "no object": ("d.jsonl", GOOD + b'["prompt"]\n', ":2", "not a JSON object"),
    "NaN": ("d.jsonl", b'{"prompt": "a", "label": NaN}\n', ":1", "NaN is no JSON value"),
    "a prompt of the wrong type": ("d.jsonl", GOOD + b'{"prompt": 7.5}\n', ":2", "is a number"),
    "metadata of the wrong type": ("d.jsonl", b'{"prompt": "a", "metadata": []}\n', ":1", "not a mapping"),
    "a message without role": ("d.jsonl", GOOD + b'{"prompt": [{"content": "a"}]}\n', ":2", "has no role"),
    "no prompt": ("d.jsonl", GOOD + b'{"promt": "a"}\n', ":2", "did you mean promt?"),
    "an empty prompt": ("d.jsonl", GOOD + b'{"prompt": " "}\n', ":2", "is empty"),
    "a key twice": ("d.jsonl", GOOD + b'{"prompt": "a", "prompt": "b"}\n', ":2", "'prompt' comes twice"),
    "a key twice inside": ("d.jsonl", b'{"prompt": "a", "metadata": {"k": 1, "k": 2}}\n', ":1", "'k' comes twice"),
    "an id twice": ("d.jsonl", b'{"prompt": "a", "id": 1}\n' * 2, ":2", "already used in line 1"),
    "nested too deeply": ("d.jsonl", GOOD + deep(MAX_DEPTH + 1), ":2", "nested too deeply"),
    "nested beyond Python's stack": ("d.jsonl", GOOD + b"[" * 10**6 + b"\n", ":2", "nested too deeply"),
    "a huge line": (
        "d.jsonl",
        GOOD + b'{"prompt": "' + b"a" * MAX_LINE_BYTES + b'"}\n' + GOOD,
        ":2",
        "longer than 16 MiB",
    ),
    "truncated gzip": ("d.jsonl.gz", gzip.compress(MANY)[:-2000], ":LATE", "no .gz file, or a damaged one"),
    "truncated bzip2": ("d.jsonl.bz2", bz2.compress(MANY)[:-2000], "", "no .bz2 file, or a damaged one"),
    "truncated xz": ("d.jsonl.xz", lzma.compress(MANY)[:-2000], ":LATE", "no .xz file, or a damaged one"),
    "no gzip at all": ("d.jsonl.gz", GOOD, "", "no .gz file, or a damaged one"),
    "truncated Parquet": ("d.parquet", b"PAR1" + b"\0" * 100, "", "no Parquet file, or a damaged one"),
    "a folder without data": ("d.jsonl", folder_without_data, "", "no data files in the folder"),
    "a link to nothing": ("d.jsonl", dangling, "", "no such file"),
}

TRAIN = ("train", "--hf-checkpoint", "model", "--num-rollout", "1", "--rm-type", "f1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that a user stands in, with a model folder and good data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    return tmp_path


def make(folder: Path, kind: str) -> str:
    name, content, _, _ = KINDS[kind]
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        content(folder / name)
    return name


def check(kind: str, said: str) -> None:
    name, _, line, words = KINDS[kind]
    assert said.startswith(f"buffer-rl: error: {name}")
    assert words in said
    assert "Traceback" not in said
    where = said.removeprefix(f"buffer-rl: error: {name}").partition(": ")[0]
    if line == ":LATE":  # what the compression left readable ends in the last third
        assert len(MANY.splitlines()) * 2 // 3 < int(where.removeprefix(":")) <= len(MANY.splitlines())
    else:
        assert where == line


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_training_file_is_told_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    name = make(folder, kind)
    before = sorted(path.name for path in folder.iterdir())
    assert main([*TRAIN, "--prompt-data", name]) == 2
    check(kind, capsys.readouterr().err)
    assert sorted(path.name for path in folder.iterdir()) == before  # no run folder yet: that is what a run makes first


@pytest.mark.parametrize("kind", ["broken JSON", "no prompt", "truncated gzip", "an empty file"])
def test_a_bad_evaluation_file_is_told_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    name = make(folder, kind)
    assert main([*TRAIN, "--prompt-data", "good.jsonl", "--eval-prompt-data", f"held={name}"]) == 2
    check(kind, capsys.readouterr().err)
    assert not (folder / "runs").exists()


def test_the_deepest_value_that_is_allowed_can_be_written_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "d.jsonl").write_bytes(deep(MAX_DEPTH))
    assert main(["data", "show", "d.jsonl"]) == 0
    assert json.loads(capsys.readouterr().out)["metadata"]
