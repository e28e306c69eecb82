"""The user's own code on other nodes: which files plugin references need, and how a worker finds what was sent.

A single file takes along what it imports from the user's folders, as far as ``import`` statements say it; a package
goes as a whole, files beside its modules included. What is installed is expected to be installed everywhere. The user's
folders are the working directory and those of ``PYTHONPATH``, without ``site-packages`` below them. A node that
has the same files in the same places uses those, so that what stands beside them is found as well.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from buffer_rl.errors import ConfigError
from buffer_rl.plugin.reference import Form, Origin, find_module, split_file

MAX_BYTES = 20 * 2**20
OUTSIDE = "_outside"  # folder of files that lie in none of the user's folders
OWN_PACKAGES = frozenset({"buffer_rl", "rm_hub", "filter_hub"})
# What stands in a package's folder and is no part of it. A folder with an __init__.py is taken along all the same.
EXCLUDED_FOLDERS = frozenset({"__pycache__", "node_modules", "venv", "runs", "checkpoints", "wandb", "weights"})
EXCLUDED_SUFFIXES = (".pyc", ".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".gguf", ".npz", ".parquet", ".arrow")


@dataclass(slots=True, kw_only=True)
class CodeBundle:
    """Files to take along.

    files: source by target, a relative path with slashes. references: target by the path in a file reference, as it
    was written. folders: the user's folders, searched for modules.
    """

    files: dict[str, Path] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    folders: tuple[str, ...]

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file, by target; of a file beyond ``MAX_BYTES``, which is no code, its size."""
        return {target: _identity(path) for target, path in sorted(self.files.items())}

    @property
    def sha256(self) -> str:
        """Of all names and contents; empty where there is nothing."""
        return hashlib.sha256(json.dumps(self.hashes()).encode()).hexdigest() if self.files else ""

    def check_size(self) -> None:
        """Raises ConfigError, naming the largest files, where there is more than nodes are sent."""
        sizes = {path: path.stat().st_size for path in self.files.values()}
        total = sum(sizes.values())
        if total <= MAX_BYTES:
            return
        largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:3]
        named = ", ".join(f"{path} ({sizes[path] / 2**20:.1f} MiB)" for path in largest)
        what = f"the code to send to other nodes has {total / 2**20:.1f} MiB in {len(sizes)} files"
        expected, instead = f"at most {MAX_BYTES // 2**20} MiB", "add --no-ship-code, which sends nothing"
        shared = f"where every node has the folder at the same path, {instead}"
        hint = f"keep data and weights out of the package; or, {shared}"
        raise ConfigError(f"{what}; the largest: {named}", where="--ray-address", expected=expected, hint=hint)

    def write(self, folder: Path) -> None:
        """Copy the files below ``folder``, with the list that ``use_shipped_code`` reads."""
        for target, source in self.files.items():
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / target)
        hashes = self.hashes()
        listing = {
            "files": {target: {"source": str(path), "sha256": hashes[target]} for target, path in self.files.items()},
            "references": self.references,
            "folders": self.folders,
        }
        (folder / LIST_NAME).write_text(json.dumps(listing), encoding="utf-8")


def collect_code(origins: Iterable[Origin], *, cwd: str, python_path: Sequence[str] = ()) -> CodeBundle:
    """The user's own files that ``origins`` need, of whatever size."""
    collector = _Collector([os.path.abspath(folder) for folder in (cwd, *filter(None, python_path))])
    for origin in origins:
        if origin.form is Form.FILE:
            collector.add_reference(origin)
        elif origin.module:
            collector.add_module(origin.module)
    collector.add_imports()
    return collector.bundle


class _Collector:
    """Follows references and imports to files. Every root (a folder that modules are searched in) has a target."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.bundle = CodeBundle(folders=tuple(dict.fromkeys(folders)))
        self._folders = [Path(folder) for folder in self.bundle.folders]
        self._targets = {folder: PurePosixPath() for folder in self._folders}
        self._unread: list[tuple[Path, Path]] = []  # a file, and the root that it was found in

    def add_reference(self, origin: Origin) -> None:
        file = Path(origin.file)
        self._targets.setdefault(file.parent, self._target_of_folder(file.parent))
        self._add(file, file.parent)
        self.bundle.references[split_file(origin.reference)[0]] = self._target(file, file.parent)

    def add_module(self, name: str, near: Path | None = None) -> None:
        """The module, if it is the user's own. near: the folder of the file that imports it."""
        parts = name.split(".")
        if parts[0] in OWN_PACKAGES or parts[0] in sys.stdlib_module_names:
            return
        if any(getattr(finder, "provided_name", None) == parts[0] for finder in sys.meta_path):
            return  # every node has the plugin that provides it (buffer_rl.plugin.import_names)
        roots = [*self._folders, *([near] if near is not None else [])]
        for count in range(1, len(parts) + 1):
            found = find_module(".".join(parts[:count]), [str(root) for root in roots])
            if found is None:
                return
            if not found.file and found.folders:
                continue  # a folder without __init__.py: what is below it is taken one by one
            file = Path(found.file)
            root = next((root for root in roots if file.is_relative_to(root)), None)
            if root is None or _is_installed(file.relative_to(root)):
                return
            if found.folders:
                self._add_package(file.parent, root)
            else:
                self._add(file, root)
            return

    def add_imports(self) -> None:
        """What the files import, and what that imports."""
        while self._unread:
            file, root = self._unread.pop()
            for name in imports_of(str(file)):
                self.add_module(name, near=root)

    def _add_package(self, folder: Path, root: Path) -> None:
        if self._target(folder / "__init__.py", root) in self.bundle.files:
            return
        for file in _package_files(folder):
            self._add(file, root)

    def _add(self, file: Path, root: Path) -> None:
        target = self._target(file, root)
        if target not in self.bundle.files:
            self.bundle.files[target] = file
            if file.suffix == ".py":
                self._unread.append((file, root))

    def _target(self, file: Path, root: Path) -> str:
        return str(self._targets[root] / PurePosixPath(file.relative_to(root)))

    def _target_of_folder(self, folder: Path) -> PurePosixPath:
        for known in self._folders:
            if folder.is_relative_to(known):
                return PurePosixPath(folder.relative_to(known))
        return PurePosixPath(OUTSIDE, hashlib.sha256(str(folder).encode()).hexdigest()[:8])


def _is_installed(path: Path) -> bool:
    """Whether the file, seen from the user's folder, belongs to an environment in it."""
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _package_files(folder: Path) -> Iterator[Path]:
    for child in sorted(folder.iterdir()):
        if child.name.startswith("."):
            continue
        if child.is_dir():
            if child.name not in EXCLUDED_FOLDERS or (child / "__init__.py").is_file():
                yield from _package_files(child)
        elif child.is_file() and not child.name.endswith(EXCLUDED_SUFFIXES):
            yield child


def imports_of(file: str) -> list[str]:
    """Absolute names that a file of Python source imports, inside functions too; of ``from a import b`` also ``a.b``.
    None of another file."""
    return _imports_in(Path(file).read_bytes()) if file.endswith(".py") and os.path.isfile(file) else []


@lru_cache(maxsize=256)
def _imports_in(source: bytes) -> list[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a reference to it was refused before; another file may stay unread
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
            names.extend(f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*")
    return names


def _identity(path: Path) -> str:
    size = path.stat().st_size
    return hashlib.sha256(path.read_bytes()).hexdigest() if size <= MAX_BYTES else f"{size} bytes"


LIST_NAME = "buffer_rl_code.json"
CODE_VARIABLE = "BUFFER_RL_CODE"


def use_shipped_code(folder: str) -> None:
    """Make this process, and those that it starts, find the code in ``folder``, unless this node has the same files.

    Does nothing for a folder that holds no shipped code.
    """
    listing = _listing(folder)
    if not listing:
        return
    if all(_is_here(file) for file in listing["files"].values()):
        sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
        sys.path.extend(entry for entry in listing["folders"] if entry not in sys.path)
        return
    os.environ[CODE_VARIABLE] = folder
    if folder not in sys.path:
        sys.path.insert(0, folder)


def search_folders() -> list[str]:
    """The folders that references are searched in by default: shipped code, then the working directory."""
    shipped = os.environ.get(CODE_VARIABLE)
    return [*([shipped] if shipped else []), os.getcwd()]


def shipped_file(path: str) -> Path | None:
    """The shipped file for the path of a file reference, as the user wrote it; None where there is none."""
    folder = os.environ.get(CODE_VARIABLE)
    target = _listing(folder).get("references", {}).get(path) if folder else None
    return Path(folder, target) if folder and target else None


def _listing(folder: str) -> dict[str, Any]:
    file = Path(folder, LIST_NAME)
    return dict(json.loads(file.read_bytes())) if file.is_file() else {}


def _is_here(file: Mapping[str, str]) -> bool:
    with suppress(OSError):
        return hashlib.sha256(Path(file["source"]).read_bytes()).hexdigest() == file["sha256"]
    return False
