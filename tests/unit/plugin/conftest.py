"""A folder that a user stands in, with helpers to write modules and installed distributions into it."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """folder: the working directory, not on ``sys.path``. site: a folder on ``sys.path``."""

    folder: Path
    site: Path

    def write(self, name: str, text: str) -> Path:
        """Write a file below the working directory."""
        return _write(self.folder / name, text)

    def install(self, distribution: str, entry_points: Mapping[str, Mapping[str, str]], **modules: str) -> None:
        """Install a distribution: its metadata with entry points by group, and its modules."""
        for module, text in modules.items():
            _write(self.site / f"{module}.py", text)
        info = f"{distribution.replace('-', '_')}-1.5.dist-info"
        _write(self.site / info / "METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        lines = [
            line
            for group, entries in entry_points.items()
            for line in [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        ]
        _write(self.site / info / "entry_points.txt", "\n".join(lines))
        importlib.invalidate_caches()


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    folder, site = tmp_path / "folder", tmp_path / "site"
    folder.mkdir()
    site.mkdir()
    before = set(sys.modules)
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(site), *sys.path])
        patch.delenv("BUFFER_RL_DISABLE_PLUGIN_AUTOLOAD", raising=False)
        yield Place(folder=folder, site=site)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]
