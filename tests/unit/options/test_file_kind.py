from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import ConfigError, DataError
from buffer_rl.options.values import parse_yaml

ROWS = [{"prompt": "a \u00fc, b", "label": "x"}, {"prompt": "c", "label": "y"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
TABLE = 'prompt,label\n"a \u00fc, b",x\nc,y\n'

# What a file looks like, by its name and content; the hint of each is a command that converts it.
CONVERTED: dict[str, tuple[str, bytes]] = {
    "a JSON array": ("data.json", json.dumps(ROWS).encode()),
    "a JSON array after a byte order mark": ("data.json", b"\xef\xbb\xbf\n " + json.dumps(ROWS, indent=1).encode()),
    "a CSV file": ("my data.csv", TABLE.encode()),
    "a CSV file of another name": ("data.jsonl", b"\xef\xbb\xbf" + TABLE.replace("\n", "\r\n").encode()),
    "a CSV file with tabs": ("data.tsv", TABLE.replace(",l", "\tl").replace(",x", "\tx").replace("c,", "c\t").encode()),
    "a CSV file with semicolons": (
        "data.csv",
        TABLE.replace(",l", ";l").replace(",x", ";x").replace("c,", "c;").encode(),
    ),
    "text in UTF-16": ("data.jsonl", LINES.encode("utf-16")),
    "text in UTF-16 without a mark": ("data.jsonl", LINES.encode("utf-16-le")),
    "text in UTF-16 of the other order": ("data.jsonl", LINES.encode("utf-16-be")),
    "text with bare carriage returns as line ends": ("data.jsonl", LINES.replace("\n", "\r").encode()),
}
NAMED: dict[str, tuple[str, bytes]] = {
    "a gzip file": ("a file of this kind is read if its name ends in .gz", gzip.compress(LINES.encode())),
    "a bzip2 file": (".bz2", bz2.compress(LINES.encode())),
    "an xz file": (".xz", lzma.compress(LINES.encode())),
    "a Parquet file": (".parquet", b"PAR1\x15\x04"),
    "a pointer of Git LFS": ("git lfs pull", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "a web page": ("download", b"<!DOCTYPE html>\n<html>"),
    "an SQLite database": ("", b"SQLite format 3\0"),
    "a binary file": ("", b"\x7fELF\x02\0\0\x01"),
}


def refusal(path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        read_dataset(str(path))
    assert caught.value.where == str(path)
    return caught.value


@pytest.mark.parametrize("min_bytes", [0, 1 << 60])
@pytest.mark.parametrize("kind", CONVERTED)
def test_the_hint_converts_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, min_bytes: int) -> None:
    monkeypatch.setattr("buffer_rl.data.files.MIN_BYTES", min_bytes)
    name, content = CONVERTED[kind]
    (tmp_path / name).write_bytes(content)
    error = refusal(tmp_path / name)
    assert kind.startswith(error.what.removeprefix("this looks like "))
    command = error.hint.removeprefix("convert it: ").replace("python -c", f"{shlex.quote(sys.executable)} -c")
    if command.startswith("iconv") and shutil.which("iconv") is None:
        pytest.skip("this machine has no iconv")
    if min_bytes:
        environ = {"PATH": "/usr/bin:/bin", "PYTHONUTF8": "1"}
        subprocess.run(command, shell=True, cwd=tmp_path, env=environ, check=True, timeout=60)
        assert [(row.prompt, row.label) for row in read_dataset(str(tmp_path / "converted.jsonl"))] == [
            (row["prompt"], row["label"]) for row in ROWS
        ]


def test_the_hint_for_a_compressed_file_converts_what_unpacking_it_leaves(tmp_path: Path) -> None:
    (tmp_path / "data.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    hint = refusal(tmp_path / "data.json.gz").hint
    assert hint.startswith("unpack the file, then convert it: python ")
    assert f"< {tmp_path / 'data.json'} >" in hint


@pytest.mark.parametrize("kind", NAMED)
def test_a_file_of_another_kind_is_named_as_data_and_as_options(tmp_path: Path, kind: str) -> None:
    hint, content = NAMED[kind]
    (tmp_path / "data").write_bytes(content)
    error = refusal(tmp_path / "data")
    assert kind in error.what
    assert hint in error.hint
    with pytest.raises(ConfigError, match=f"data: this looks like {kind}"):
        parse_yaml(str(tmp_path / "data"))


@pytest.mark.parametrize("text", [LINES, LINES.replace("\n", "\r\n"), "\n\n" + LINES, LINES.strip(), "\ufeff" + LINES])
def test_json_lines_are_nothing_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.jsonl").write_bytes(text.encode())
    assert len(read_dataset(str(tmp_path / "data.jsonl"))) == 2


def test_one_object_over_several_lines_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps(ROWS[0], indent=2))
    assert refusal(tmp_path / "data.json").what == "this looks like one JSON object over several lines"
