"""The forms of a plugin reference, and where one leads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from buffer_rl.resolution.shipped import shipped_file


class Form(StrEnum):
    """The ways to write a reference."""

    OBJECT = "object"
    MODULE = "module:attr"
    FILE = "file.py:attr"
    NAME = "name"
    DOTTED = "module.attr"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a reference leads. ``kind`` is empty for a whole pluggy plugin.

    module: empty for a file. attr: may have dots. line: where ``attr`` is bound in ``file``. verified: the
    attribute was seen; if not, only the import will tell (a star import, an extension module, an attribute of
    an attribute). distribution, version: of the entry point. provider: the pluggy plugin that offers a name.
    """

    kind: str
    reference: str
    form: Form
    module: str = ""
    attr: str = ""
    file: str = ""
    line: int | None = None
    verified: bool = False
    distribution: str = ""
    version: str = ""
    provider: str = ""

    def __str__(self) -> str:
        place = shorten(self.file) + (f":{self.line}" if self.line else "") if self.file else self.module
        package = f"{self.distribution} {self.version}".strip()
        plugin = f"plugin {self.provider}" if self.provider else ""
        return ", ".join(part for part in (place, package, plugin) if part)


def form_of(reference: str) -> Form:
    """The form that ``reference`` is written in, from its text alone; a name that has dots counts as DOTTED."""
    target, colon, _ = reference.rpartition(":")
    target = target if colon else reference
    if "/" in target or os.sep in target or target.endswith(".py"):
        return Form.FILE
    if colon:
        return Form.MODULE
    return Form.DOTTED if "." in reference else Form.NAME


def split_file(reference: str) -> tuple[str, str]:
    """Path and attribute of ``path/to/file.py:attr``; the attribute is empty where there is none."""
    path, colon, attr = reference.rpartition(":")
    return (path, attr) if colon else (reference, "")


def resolve_file(path: str, folders: Sequence[str]) -> Path | None:
    """The absolute path of an existing file, searched from each of ``folders`` in turn if it is relative. A file that
    came with the run stands in for the one that the path means elsewhere."""
    shipped = shipped_file(path)
    if shipped is not None:
        return shipped
    expanded = Path(path).expanduser()
    candidates = [expanded] if expanded.is_absolute() else [Path(folder) / expanded for folder in folders]
    return next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)


def shorten(file: str) -> str:
    """A path for a message: relative to the working directory where it lies below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
