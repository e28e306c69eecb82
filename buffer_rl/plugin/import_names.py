"""Import names of packages that are not installed, which a plugin provides for code that was written for them.

An entry point of the group ``buffer_rl.import_names`` says which: its name is the top-level package, its value names a
``NameTable``. A finder, which makes the modules of the table, is put on ``sys.meta_path`` only once a plugin's code
asks for the name and nothing else has it, or ``-p NAME`` does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from buffer_rl.plugin.calls import contained, error_name, plugin_error
from buffer_rl.plugin.entry_points import EntryPointInfo, EntryPoints
from buffer_rl.plugin.reference import find_module
from buffer_rl.plugin.shipping import imports_of

KIND = "import_names"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """The modules of a package, and where what they name is.

    modules: by the dotted name below the package, which is "" itself: the modules that have the names, each with a
    text as after ``import``. A package that has modules alone needs no row. absent: what is in place of names that
    cannot be had, by ``module.name``. page: what to read about all others.

    Example:
        NameTable(
            modules={"utils.types": {"buffer_rl.records.groups": "Sample, SampleGroup as Group"}},
            absent={"utils.types.Actor": "the driver starts the trainer"},
            page="docs/coming_from_there.md",
        )
    """

    modules: Mapping[str, Mapping[str, str]]
    absent: Mapping[str, str] = field(default_factory=dict)
    page: str = ""

    def names_of(self, module: str) -> dict[str, tuple[str, str]]:
        """Of each name in a module, the module that has it and its name there."""
        found: dict[str, tuple[str, str]] = {}
        for where, names in self.modules.get(module, {}).items():
            for name in names.split(","):
                there, _, here = name.strip().partition(" as ")
                found[here or there] = where, there
        return found

    def is_package(self, module: str) -> bool:
        """Whether other modules of the table are in it."""
        return any(other.startswith(f"{module}.") if module else other for other in self.modules)


class ImportNames:
    """The import names that may be provided in this process. folders: searched after ``sys.path`` for the real ones."""

    def __init__(self, entry_points: EntryPoints, folders: Sequence[str]) -> None:
        self._entry_points = entry_points
        self._folders = folders

    def request(self, name: str) -> bool:
        """Provide ``name`` for ``-p NAME``, before an installed package of that name; False where no plugin has it.

        Raises PluginError where the installed package is loaded already."""
        entry = self._entry(name)
        if entry is None:
            return False
        loaded = sys.modules.get(name)
        if loaded is not None and not is_provided(loaded):
            file = getattr(loaded, "__file__", None)
            raise plugin_error(None, name, f"the package {name!r} is loaded already, from {file}")
        _install(entry, first=True)
        return True

    def provide_for(self, file: str) -> None:
        """Provide the names that the source ``file`` imports, at its top or inside functions, and nothing else has."""
        if self._entry_points.usable(KIND):
            self.provide(imports_of(file))

    def are_asked_by(self, file: str) -> bool:
        """Whether the source ``file`` imports any of the names."""
        names = {entry.name for entry in self._entry_points.usable(KIND)}
        return bool(names) and any(name.partition(".")[0] in names for name in imports_of(file))

    def provide(self, names: Iterable[str]) -> bool:
        """Provide those of ``names``, modules or packages, that nothing else has. Whether there were any."""
        provided = False
        for root in {name.partition(".")[0] for name in names}:
            entry = self._entry(root)
            if entry is None or _is_installed(root):
                continue
            found = find_module(root, self._folders)
            if found is not None and found.file:
                continue
            if found is not None:  # a folder of that name, such as a checkout, which Python takes for a package
                sys.modules.pop(root, None)
            _install(entry, first=found is not None)
            provided = True
        return provided

    def provide_missing(self, error: BaseException | None) -> bool:
        """Provide the name for want of which an import failed. Whether there is one."""
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return bool(missing) and self.provide([str(missing)])

    def _entry(self, name: str) -> EntryPointInfo | None:
        return next((entry for entry in self._entry_points.usable(KIND) if entry.name == name), None)


class ImportNameFinder(Loader):
    """Finds and makes the modules of a table under the name of a package. What is in them is imported when it is asked
    for. Of a module that is not in the table, a folder on the package's ``__path__`` may have the file.

    A module or name that is not there raises ImportError with the page to read.
    """

    def __init__(self, name: str, table: NameTable) -> None:
        self.provided_name = name
        self._table = table

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib's finders."""
        top, _, module = fullname.partition(".")
        if top != self.provided_name:
            return None
        if module in self._table.modules or self._table.is_package(module):
            return ModuleSpec(fullname, self, is_package=self._table.is_package(module))
        if any(_has_module(folder, fullname) for folder in path or ()):
            return None
        what = f"{fullname!r} is not among the names of {top!r} that buffer_rl provides"
        raise ModuleNotFoundError(f"{what}; {self._table.page} says what there is in its place", name=fullname)

    def exec_module(self, module: ModuleType) -> None:
        """As importlib's loaders: fill the module with what the table says of it."""
        below = module.__name__.partition(".")[2]
        names = self._table.names_of(below)

        def found(name: str) -> Any:
            if name in names:
                where, there = names[name]
                value = getattr(importlib.import_module(where), there)
                setattr(module, name, value)
                return value
            if name.startswith("__"):  # Python's own questions, such as for __file__
                raise AttributeError(name)
            if hasattr(module, "__path__"):  # ``from package import module`` asks for it
                return importlib.import_module(f"{module.__name__}.{name}")
            reason = self._table.absent.get(f"{below}.{name}", "buffer_rl has nothing that does the same")
            absent = f"{module.__name__}.{name}"
            raise ImportError(f"{absent} cannot be had here: {reason}; see {self._table.page}", name=absent)

        if names:
            vars(module)["__all__"] = [*names]
        vars(module)["__getattr__"] = found


def is_provided(module: ModuleType) -> bool:
    """Whether the module was made by an ``ImportNameFinder``."""
    return isinstance(getattr(module, "__loader__", None), ImportNameFinder)


def _has_module(folder: str, fullname: str) -> bool:
    last = fullname.rpartition(".")[2]
    return Path(folder, f"{last}.py").is_file() or Path(folder, last).is_dir()


def _is_installed(name: str) -> bool:
    return any(isinstance(finder, ImportNameFinder) and finder.provided_name == name for finder in sys.meta_path)


def _install(entry: EntryPointInfo, *, first: bool) -> None:
    if _is_installed(entry.name):
        return
    module, _, attribute = entry.target.partition(":")
    try:
        with contained():
            table = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # fault boundary: another distribution's module may raise anything
        what = f"its table fails to load: {error_name(error)}"
        raise plugin_error(None, entry.name, what, origin=str(entry)) from error
    if not isinstance(table, NameTable):
        raise plugin_error(None, entry.name, f"{entry.target!r} is no NameTable", origin=str(entry))
    sys.meta_path.insert(0 if first else len(sys.meta_path), ImportNameFinder(entry.name, table))
