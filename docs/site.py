"""What the documentation site (mkdocs.yml) has besides the pages of ``docs/``.

A hook of MkDocs: the pages outside ``docs/``, such as the READMEs of plugins and examples, become pages of the site.
Links are those that work in the repository. A file that a page links to and that is no page is copied.

An extension of griffe: ``name: text`` at the start of a docstring's line is shown as an entry of a list.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "project"
"""The folder of the site with what is outside ``docs/``."""
_FIELD = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): ", re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def address(file: PurePosixPath) -> str:
    """Where a file of the repository is in the site."""
    return str(file.relative_to("docs")) if file.parts[0] == "docs" else f"{OUTSIDE}/{file}"


def targets(text: str, at: PurePosixPath) -> Iterator[PurePosixPath]:
    """The files of the repository that the page at ``at`` links to; of a folder, its README."""
    for match in _LINK.finditer(text):
        if found := target(match[2], at):
            yield found


def target(link: str, at: PurePosixPath) -> PurePosixPath | None:
    """The file that a link of the page ``at`` names; None if it is an address, or in this page."""
    path = link.partition("#")[0]
    if not path or re.match(r"\w+:", path):
        return None
    file = PurePosixPath(os.path.normpath(at.parent / path))
    if (ROOT / file).is_dir():
        file /= "README.md"
    return file if (ROOT / file).is_file() else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to, and what those pages link to."""
    known = {file.src_uri for file in files}
    waiting = [PurePosixPath("docs", file.src_uri) for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for file in targets((ROOT / page).read_text(encoding="utf-8"), page):
            if address(file) in known:
                continue
            known.add(address(file))
            if file.suffix == ".md":
                waiting.append(file)
            files.append(File.generated(config, address(file), abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links, which are relative to the file in the repository."""
    uri = PurePosixPath(page.file.src_uri)
    at = uri.relative_to(OUTSIDE) if uri.parts[0] == OUTSIDE else PurePosixPath("docs", uri)

    def rewritten(match: re.Match[str]) -> str:
        file = target(match[2], at)
        if file is None:
            return match[0]
        path = os.path.relpath(address(file), uri.parent)
        _, hash_sign, anchor = match[2].partition("#")
        return f"{match[1]}{path}{hash_sign}{anchor}{match[3]}"

    return _LINK.sub(rewritten, markdown)


class FieldLists(griffe.Extension):
    """Shows the fields and parameters that docstrings describe as lists."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class and function."""
        if obj.docstring is not None:
            lines = _FIELD.sub(r"- **\1**: ", obj.docstring.value).splitlines()
            for number in range(1, len(lines)):
                if lines[number].startswith("- **") and lines[number - 1] and not _in_list(lines, number - 1):
                    lines[number] = "\n" + lines[number]
            obj.docstring.value = "\n".join(lines)


def _in_list(lines: list[str], number: int) -> bool:
    """Whether the line belongs to an entry: no empty line stands between it and the entry's first one."""
    while number >= 0 and lines[number].strip():
        if lines[number].lstrip().startswith("- **"):
            return True
        number -= 1
    return False
