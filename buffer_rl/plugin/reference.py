"""The forms of a plugin reference, and the modules and names that it may mean, found in the source without importing.

Sources are read and parsed, never run, so that a misspelt reference is reported in milliseconds, before torch or a
user's own module is imported.
"""

from __future__ import annotations

import ast
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from buffer_rl.plugin.calls import nearest


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
    an attribute). distribution, version: of the entry point. provider: the pluggy plugin that provides a name.
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


def shorten(file: str) -> str:
    """A path for a message: relative to the working directory where it lies below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


# A top-level module may be any of hundreds installed, so the suggestion must be closer than one among siblings.
_CUTOFF_AMONG_INSTALLED = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModule:
    """Where a module is. ``file`` is empty for namespace packages and builtins."""

    name: str
    file: str = ""
    folders: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class SourceNames:
    """The names that a module's source binds at its top level, with their lines.

    callables: those bound by ``def`` or ``class``. is_open: the module may bind more than its source shows
    (a star import, a module ``__getattr__``, ``globals()``).
    """

    lines: dict[str, int] = field(default_factory=dict)
    callables: set[str] = field(default_factory=set)
    is_open: bool = False

    @property
    def public(self) -> list[str]:
        """Functions and classes without a leading underscore."""
        return [name for name in self.callables if not name.startswith("_")]


def find_module(name: str, folders: Sequence[str]) -> FoundModule | None:
    """Find ``name`` on ``sys.path``, then in ``folders``; no parent package is imported on the way."""
    found: FoundModule | None = None
    if not all(part.isidentifier() for part in name.split(".")):
        return None  # finders may raise on what cannot be a name
    for part in name.split("."):
        found = _find(part if found is None else f"{found.name}.{part}", found, folders)
        if found is None:
            return None
    return found


def nearest_module(name: str, folders: Sequence[str]) -> str | None:
    """An existing module whose name is most like ``name``: the first wrong component is exchanged, then the next."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        if find_module(".".join(parts[:count]), folders) is not None:
            continue
        parent = find_module(".".join(parts[: count - 1]), folders) if count > 1 else None
        match = _nearest_child(parent, parts[count - 1], folders)
        if match is None:
            return None
        candidate = ".".join([*parts[: count - 1], match, *parts[count:]])
        return candidate if count == len(parts) else nearest_module(candidate, folders)
    return name


@lru_cache(maxsize=256)
def read_names(source: str | bytes, file: str) -> SourceNames:
    """The names that ``source`` binds at its top level. Raises SyntaxError with ``file`` and the line."""
    tree = ast.parse(source, filename=file)
    names = SourceNames()
    for statement in _top_level(tree.body):
        _add_bound(statement, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names.lines.update(dict.fromkeys(node.names, node.lineno))
        elif isinstance(node, ast.NamedExpr):
            names.lines.setdefault(node.target.id, node.lineno)
        elif _writes_namespace(node):
            names.is_open = True
    names.is_open = names.is_open or "__getattr__" in names.lines
    return names


def files_named(module: str, folders: Sequence[str]) -> list[str]:
    """Files of a module in ``folders``, whether or not another module of that name comes first."""
    candidates = [Path(folder, *module.split(".")).with_suffix(".py") for folder in folders if module]
    return [str(path) for path in candidates if path.is_file()]


def _find(name: str, parent: FoundModule | None, folders: Sequence[str]) -> FoundModule | None:
    loaded = sys.modules.get(name)
    if loaded is not None:
        file, folders = getattr(loaded, "__file__", None) or "", getattr(loaded, "__path__", ())
        return FoundModule(name=name, file=file, folders=tuple(folders))
    spec = next(filter(None, _specs_of(name, parent, folders)), None)
    if spec is None:
        return None
    file, folders = spec.origin if spec.has_location else "", spec.submodule_search_locations or ()
    return FoundModule(name=name, file=file or "", folders=tuple(folders))


def _specs_of(name: str, parent: FoundModule | None, folders: Sequence[str]) -> Iterator[ModuleSpec | None]:
    for finder in sys.meta_path:
        if parent is None:  # an editable install may bring a finder of its own
            yield finder.find_spec(name, None) if hasattr(finder, "find_spec") else None
        elif getattr(finder, "provided_name", None) == name.partition(".")[0]:
            # One that makes modules which no folder has (buffer_rl.plugin.import_names).
            with suppress(ModuleNotFoundError):
                yield finder.find_spec(name, parent.folders)
    if parent is None or parent.folders:
        # The last component alone: under its full name, a namespace package would ask for its imported parent.
        yield PathFinder.find_spec(name.rpartition(".")[2], list(parent.folders if parent else folders))


def _nearest_child(parent: FoundModule | None, part: str, folders: Sequence[str]) -> str | None:
    if parent is not None:
        return nearest(part, _modules_in(parent.folders))
    here = nearest(part, _modules_in(folders))
    return here or nearest(part, _modules_in(sys.path), cutoff=_CUTOFF_AMONG_INSTALLED)


def _modules_in(folders: Sequence[str]) -> list[str]:
    existing = [folder or os.getcwd() for folder in folders]
    return [module.name for module in pkgutil.iter_modules(existing) if not module.name.startswith("__")]


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import in the module's own scope, inside ``if``, ``try``, ``with`` and loops too."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for block in ("body", "orelse", "finalbody"):
            yield from _top_level(getattr(statement, block, []))
        for clause in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _top_level(clause.body)


def _writes_namespace(node: ast.AST) -> bool:
    """Whether the node may bind names that the source does not show: globals(), vars(), exec(...), sys.modules."""
    match node:
        case (
            ast.Call(func=ast.Name(id="globals" | "exec"))
            | ast.Call(func=ast.Name(id="vars" | "locals"), args=[])
            | ast.Attribute(value=ast.Name(id="sys"), attr="modules")
        ):
            return True
    return False


def _add_bound(statement: ast.stmt, names: SourceNames) -> None:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names.lines[statement.name] = statement.lineno
        names.callables.add(statement.name)
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            if alias.name == "*":
                names.is_open = True
            bound = alias.asname or alias.name
            names.lines[bound.split(".")[0]] = statement.lineno
    else:
        for node in _own_nodes(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.lines.setdefault(node.id, node.lineno)
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
                names.lines.setdefault(node.name, node.lineno)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement without the statements inside it and the scopes of comprehensions and lambdas."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda):
            yield child
            yield from _own_nodes(child)
