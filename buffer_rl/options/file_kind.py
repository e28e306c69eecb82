"""Files that are not what their place asks for, recognised by their first bytes: what each looks like, and how to
convert it. For errors alone; no file is read differently because of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

HEAD_BYTES = 1 << 16
"""What to look at of a file."""
_OUT = "converted"
# The first bytes of a kind, what it is, and the suffix by which it would be read; without one it is not read at all.
_SIGNATURES: Sequence[tuple[bytes, str, str]] = (
    (b"\x1f\x8b", "a gzip file", ".gz"),
    (b"BZh", "a bzip2 file", ".bz2"),
    (b"\xfd7zXZ\x00", "an xz file", ".xz"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file", ".zst"),
    (b"PK\x03\x04", "a zip archive", ".zip"),
    (b"PAR1", "a Parquet file", ".parquet"),
    (b"ARROW1", "an Arrow file", ""),
    (b"SQLite format 3\x00", "an SQLite database", ""),
    (b"\x80\x04\x95", "a pickle", ""),
)
_UTF_16_STARTS = (b"\xff\xfe", b"\xfe\xff")
_BOM = b"\xef\xbb\xbf"
_LFS_START = b"version https://git-lfs"
_CSV_HEAD = re.compile(rb'"?[A-Za-z_][\w ]*"?([,;\t]"?[A-Za-z_][\w ]*"?)+\r?$')
_PRETTY_OBJECT = re.compile(rb'\{\s*\n\s+"')


def not_text(head: bytes, path: str) -> tuple[str, str]:
    """What a file is that begins with ``head`` and is no UTF-8 text, and what to do; empty texts if it may be text."""
    if what := next((what for start, what, _ in _SIGNATURES if head.startswith(start)), ""):
        return what, ""
    marked = head.startswith(_UTF_16_STARTS)
    if marked or _is_half_nul(head):
        suffix = PurePath(path).suffix
        order = "" if marked else "BE" if head.startswith(b"\0") else "LE"
        return "text in UTF-16", f"convert it: iconv -f UTF-16{order} -t UTF-8 {shlex.quote(path)} > {_OUT}{suffix}"
    if b"\0" in head and not head.lstrip().startswith(b"{"):  # else a line of text holds it
        return "a binary file", ""
    if head.startswith(_LFS_START):
        return "a pointer of Git LFS, not the file itself", "git lfs pull"
    if head.removeprefix(_BOM).lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "a web page", "download the file itself"
    return "", ""


def not_jsonl(head: bytes, path: str) -> tuple[str, str]:
    """As ``not_text``, also for text that is not one JSON object a line: a JSON array, CSV, bare carriage returns."""
    if suffix := next((suffix for start, _, suffix in _SIGNATURES if head.startswith(start)), ""):
        return not_text(head, path)[0], f"a file of this kind is read if its name ends in {suffix}"
    what, hint = not_text(head, path)
    if what:
        return what, hint
    text = head.removeprefix(_BOM).strip()
    if b"\r" in text and b"\n" not in text:
        return "text with bare carriage returns as line ends", _by("tr '\\r' '\\n'", path)
    if text.startswith(b"["):
        return "a JSON array", _by_python("json, sys", "for row in json.load(sys.stdin.buffer)", path)
    if _PRETTY_OBJECT.match(text):
        loop = "for row in [json.load(sys.stdin.buffer)]"
        return "one JSON object over several lines", _by_python("json, sys", loop, path)
    first_line = text.partition(b"\n")[0]
    if (path.lower().endswith((".csv", ".tsv")) and not text.startswith(b"{")) or _CSV_HEAD.match(first_line):
        delimiter = next((mark for mark in ("\\t", ";") if mark.replace("\\t", "\t").encode() in first_line), ",")
        loop = f'for row in csv.DictReader(open(0, encoding="utf-8-sig", newline=""), delimiter="{delimiter}")'
        return "a CSV file", _by_python("csv, json", loop, path)
    return "", ""


def _is_half_nul(head: bytes) -> bool:
    """Whether every other byte is NUL, as in UTF-16 of European text."""
    return len(head) > 3 and any(head[start::2].count(0) > len(head) // 3 for start in (0, 1))


def _by_python(modules: str, loop: str, path: str) -> str:
    return _by(f"python -c 'import {modules}; [print(json.dumps(row)) {loop}]'", path)


def _by(command: str, path: str) -> str:
    return f"convert it: {command} < {shlex.quote(path)} > {_OUT}.jsonl"
