"""Import names of packages that are not installed, which a plugin provides for code that was written for them.

An entry point of the group ``buffer_rl.import_names`` says which: its name is the top-level package, its value a
package whose files are loaded under that name. A finder is put on ``sys.meta_path`` only once a plugin's code asks for
the name and nothing else has it, or ``-p NAME`` does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from buffer_rl.plugin.calls import plugin_error
from buffer_rl.plugin.entry_points import EntryPointInfo, EntryPoints
from buffer_rl.plugin.reference import find_module
from buffer_rl.plugin.shipping import imports_of

KIND = "import_names"


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
        _install(name, self._folder(entry), first=True)
        return True

    def provide_for(self, file: str) -> None:
        """Provide the names that the source ``file`` imports, at its top or inside functions, and nothing else has."""
        if file.endswith(".py") and Path(file).is_file() and self._entry_points.usable(KIND):
            self.provide(imports_of(Path(file)))

    def are_asked_by(self, file: str) -> bool:
        """Whether the source ``file`` imports any of the names."""
        names = {entry.name for entry in self._entry_points.usable(KIND)}
        if not names or not file.endswith(".py") or not Path(file).is_file():
            return False
        return any(name.partition(".")[0] in names for name in imports_of(Path(file)))

    def provide(self, names: Iterable[str]) -> bool:
        """Provide those of ``names``, modules or packages, that nothing else has. Whether there were any."""
        provided = False
        for root in {name.partition(".")[0] for name in names}:
            entry = self._entry(root)
            found = None if entry is None else find_module(root, self._folders)
            if entry is None or (found is not None and found.file):
                continue
            if found is not None:  # a folder of that name, such as a checkout, which Python takes for a package
                sys.modules.pop(root, None)
            _install(root, self._folder(entry), first=found is not None)
            provided = True
        return provided

    def provide_missing(self, error: BaseException | None) -> bool:
        """Provide the name for want of which an import failed. Whether there is one."""
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return bool(missing) and self.provide([str(missing)])

    def _entry(self, name: str) -> EntryPointInfo | None:
        return next((entry for entry in self._entry_points.usable(KIND) if entry.name == name), None)

    def _folder(self, entry: EntryPointInfo) -> str:
        found = find_module(entry.value, self._folders)
        if found is None or not found.folders:
            raise plugin_error(None, entry.name, f"its package {entry.value!r} is not there", origin=str(entry))
        return found.folders[0]


class ImportNameFinder:
    """Finds top-level packages in folders of other names; what is below them, Python finds by itself.

    A module below them that is not there raises ImportError with the page to read.
    """

    def __init__(self, name: str, folder: str) -> None:
        self.provided_name = name
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib's finders."""
        if fullname == self.provided_name:
            return importlib.util.spec_from_file_location(
                fullname, f"{self.folder}/__init__.py", submodule_search_locations=[self.folder]
            )
        if fullname.startswith(f"{self.provided_name}.") and path is not None and _is_missing(fullname, path):
            raise ModuleNotFoundError(
                f"{fullname!r} is not among the names of {self.provided_name!r} that buffer_rl provides; "
                "docs/coming_from_slime.md says what there is in its place",
                name=fullname,
            )
        return None


def is_provided(module: ModuleType) -> bool:
    """Whether the module was found by an ``ImportNameFinder``."""
    return any(
        isinstance(finder, ImportNameFinder) and getattr(module, "__file__", None) == f"{finder.folder}/__init__.py"
        for finder in sys.meta_path
    )


def _is_missing(fullname: str, path: Sequence[str]) -> bool:
    last = fullname.rpartition(".")[2]
    return not any(Path(folder, f"{last}.py").is_file() or Path(folder, last).is_dir() for folder in path)


def _install(name: str, folder: str, *, first: bool) -> None:
    if any(isinstance(finder, ImportNameFinder) and finder.provided_name == name for finder in sys.meta_path):
        return
    sys.meta_path.insert(0 if first else len(sys.meta_path), ImportNameFinder(name, folder))
