"""Find what a path reference names without importing it, and import it.

What names nothing is an error with the nearest name. An import that fails shows its own error with file and line,
never "not found".
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

from buffer_rl.errors import PluginError
from buffer_rl.kinds.kind import PluginKind
from buffer_rl.plugin.calls import contained, error_name, nearest, original, plugin_error
from buffer_rl.plugin.old_names import new_name
from buffer_rl.plugin.reference import (
    Form,
    FoundModule,
    Origin,
    SourceNames,
    files_named,
    find_module,
    form_of,
    nearest_module,
    read_names,
    shorten,
    split_file,
)
from buffer_rl.plugin.shipping import OWN_PACKAGES, shipped_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search for a reference.

    kind: None for a whole pluggy plugin. shown: the reference as the user wrote it, for messages (an entry
    point's value is another). folders: searched after ``sys.path``. known: names to list where nothing is found.
    """

    kind: PluginKind | None
    shown: str
    folders: Sequence[str]
    known: tuple[str, ...] = ()

    def locate(self, reference: str) -> Origin:
        """Where ``module:attr``, ``file.py:attr`` or ``module.attr`` leads. Raises PluginError."""
        form = form_of(reference)
        if form is Form.FILE:
            return self._locate_file(reference)
        self._refuse_old_name(reference)
        module, attr = reference.split(":", 1) if form is Form.MODULE else self._split_dotted(reference)
        if not all(part.isidentifier() for part in f"{module}.{attr}".split(".")):
            raise self._malformed(module, attr)
        found = self.module(module, attr, separator=":" if form is Form.MODULE else ".")
        if reference == self.shown:  # an entry point means the module that is installed
            self._refuse_hidden(module, attr, found)
        return self._with_attribute(form, attr, found.file, module, found)

    def module(self, name: str, attr: str = "", *, separator: str = ":") -> FoundModule:
        """The module ``name``. Raises PluginError with the nearest module that exists."""
        found = find_module(name, self.folders)
        if found is not None:
            return found
        self._refuse_old_name(name)
        candidate = nearest_module(name, self.folders)
        suggestion = candidate
        if candidate is not None and attr:
            suggestion = f"{candidate}{separator}{self._nearest_attribute(candidate, attr)}"
        if separator == "." and candidate is None:
            suggestion = nearest(self.shown, self.known)
        hint = f"modules are searched on sys.path and in {', '.join(map(str, self.folders))}"
        if hidden := files_named(name, self.folders):
            suggestion, hint = None, _hidden_hint(hidden[0], attr)
        what = f"there is no module {name!r}"
        raise self.error(what, suggestion=suggestion, known=self.known if separator == "." else (), hint=hint)

    def _refuse_old_name(self, reference: str) -> None:
        if new := new_name(reference):
            raise self.error(f"{reference} is {new} now", suggestion=new if reference == self.shown else None)

    def _refuse_hidden(self, module: str, attr: str, found: FoundModule) -> None:
        """Raises PluginError if a module of the standard library, or an installed one, is found in place of a file of
        the user's own."""
        top = module.partition(".")[0]
        installed = bool({"site-packages", "dist-packages"} & set(Path(found.file).parts))
        standard = top in sys.stdlib_module_names or found.file.startswith(sysconfig.get_path("stdlib") + os.sep)
        if top in OWN_PACKAGES or not (installed or standard):
            return
        for file in files_named(module, self.folders):
            if found.file and Path(file).read_bytes() == Path(found.file).read_bytes():
                continue  # it does not matter which
            whose = "that is installed" if installed else "of the standard library"
            what = f"the module {module!r} {whose} hides the file {shorten(file)}"
            raise self.error(what, origin=found.file, hint=_hidden_hint(file, attr))

    @property
    def error(self) -> partial[PluginError]:
        """A PluginError about this reference: ``plugin_error`` from ``what`` on."""
        return partial(plugin_error, self.kind, self.shown)

    def _split_dotted(self, reference: str) -> tuple[str, str]:
        """Module and attribute of ``a.b.c``: the longest prefix that is a module."""
        parts = reference.split(".")
        for count in range(len(parts), 0, -1):
            if find_module(".".join(parts[:count]), self.folders) is not None:
                return ".".join(parts[:count]), ".".join(parts[count:])
        return ".".join(parts[:-1]), parts[-1]

    def _locate_file(self, reference: str) -> Origin:
        path, attr = split_file(reference)
        file = resolve_file(path, self.folders)
        if file is None:
            raise self._no_file(path, attr)
        if not attr:
            raise self._names_nothing("a file", path, str(file))
        return self._with_attribute(Form.FILE, attr, str(file))

    def _with_attribute(
        self, form: Form, attr: str, file: str, module: str = "", found: FoundModule | None = None
    ) -> Origin:
        """The origin with the attribute's line, where the source shows it. Raises PluginError where there is none."""
        kind = self.kind.name if self.kind else ""
        origin = Origin(kind=kind, reference=self.shown, form=form, module=module, attr=attr, file=file)
        names = self._names(file)
        head, _, rest = attr.partition(".")
        if head in names.lines:
            return replace(origin, line=names.lines[head], verified=not rest)
        if names.is_open or (found is not None and find_module(f"{found.name}.{head}", self.folders) is not None):
            return origin
        what = f"the module {module!r} has no {head!r}" if module else f"the file has no {head!r}"
        base = self.shown[: len(self.shown) - len(attr)] if self.shown.endswith(attr) else ""
        meant = f"{base}{match}" if (match := nearest(head, names.lines)) else None
        hidden = [other for other in files_named(module, self.folders) if other != file]
        hint = _hidden_hint(hidden[0], attr) if hidden else ""
        raise self.error(what, origin=shorten(file), suggestion=meant, known=names.public, hint=hint)

    def _names(self, file: str) -> SourceNames:
        """The names in a source file; all names are possible where there is no source to read."""
        if not file.endswith(".py"):
            return SourceNames(is_open=True)
        try:
            return read_names(Path(file).read_bytes(), file)
        except SyntaxError as error:
            line = (error.text or "").strip()
            what = f"SyntaxError: {error.msg}" + (f" in {line!r}" if line else "")
            raise self.error(what, origin=f"{shorten(file)}:{error.lineno}") from error
        except (OSError, ValueError) as error:  # ValueError: null bytes
            raise self.error(f"the file cannot be read: {error}", origin=shorten(file)) from error

    def _nearest_attribute(self, module: str, attr: str) -> str:
        found = find_module(module, self.folders)
        names = self._names(found.file) if found is not None and found.file.endswith(".py") else SourceNames()
        return attr if attr in names.lines else nearest(attr, names.lines) or attr

    def _no_file(self, path: str, attr: str) -> PluginError:
        parent = Path(path).expanduser().parent
        places = [parent] if parent.is_absolute() else [Path(folder) / parent for folder in self.folders]
        siblings = [file.name for place in places if place.is_dir() for file in sorted(place.glob("*.py"))]
        match = nearest(Path(path).name, siblings)
        corrected = path[: len(path) - len(Path(path).name)] + match if match else None
        what, hint = f"there is no file {path!r}", f"searched from {', '.join(map(str, self.folders))}"
        return self.error(what, suggestion=f"{corrected}:{attr}" if corrected and attr else corrected, hint=hint)

    def _malformed(self, module: str, attr: str) -> PluginError:
        if module and not attr and (found := find_module(module, self.folders)) is not None:
            return self._names_nothing("a module", module, found.file)
        return self.error("it is no reference", hint="write module:function, ./file.py:function or a registered name")

    def _names_nothing(self, what: str, place: str, file: str) -> PluginError:
        functions = sorted(self._names(file).public)
        what, hint = f"it names {what}, but nothing in it", f"write {place}:function"
        meant = f"{place}:{functions[0]}" if len(functions) == 1 else None
        return self.error(what, origin=shorten(file), suggestion=meant, known=functions, hint=hint)


def _hidden_hint(file: str, attr: str) -> str:
    name = shorten(file)
    return f"{file} is hidden by another module; write {name if os.path.isabs(name) else f'./{name}'}:{attr or 'NAME'}"


def resolve_file(path: str, folders: Sequence[str]) -> Path | None:
    """The absolute path of an existing file, searched from each of ``folders`` in turn if it is relative. A file that
    was shipped with the run replaces the one at that path."""
    shipped = shipped_file(path)
    if shipped is not None:
        return shipped
    expanded = Path(path).expanduser()
    candidates = [expanded] if expanded.is_absolute() else [Path(folder) / expanded for folder in folders]
    return next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)


def import_object(search: Search, origin: Origin) -> object:
    """The object that ``origin`` leads to. Raises PluginError."""
    if origin.module:
        module = import_module(search, origin.module)
    else:
        module = _guarded(search, lambda: _execute_file(Path(origin.file)), origin.file)
    target: object = module
    for part in origin.attr.split("."):
        if not hasattr(target, part) and isinstance(target, ModuleType) and hasattr(target, "__path__"):
            _import_submodule(search, target, part)
        if not hasattr(target, part):
            owner = f"the module {target.__name__!r}" if isinstance(target, ModuleType) else repr(target)
            names = [name for name in dir(target) if not name.startswith("_")]
            match = nearest(part, names)
            what = f"{owner} has no {part!r}" + (f"; the nearest name is {match!r}" if match else "")
            known = [name for name in names if callable(getattr(target, name, None))]
            raise search.error(what, origin=str(origin), known=known)
        target = getattr(target, part)
    return target


def import_module(search: Search, name: str) -> ModuleType:
    """Import a module that was found before. Raises PluginError with the import's own error."""
    append_to_path(search.folders)
    found = search.module(name)
    return _guarded(search, lambda: importlib.import_module(name), found.file)


def append_to_path(folders: Sequence[str]) -> None:
    """Put folders at the end of ``sys.path``, so that they never hide anything that is installed.

    They stay there, because a module may import its neighbours as late as at its first call.
    """
    known = {os.path.abspath(entry) for entry in sys.path}
    sys.path.extend(folder for folder in folders if os.path.abspath(folder) not in known)


def _import_submodule(search: Search, package: ModuleType, part: str) -> None:
    name = f"{package.__name__}.{part}"
    if importlib.util.find_spec(name) is not None:
        import_module(search, name)


def _execute_file(file: Path) -> ModuleType:
    """Run a file as a module, once a process. Its folder goes to the end of ``sys.path``.

    The module has the name under which ``import`` finds the file, so that processes that the user's code starts find
    pickled functions of it. A file that another module hides gets a name that nothing else has.
    """
    append_to_path([str(file.parent)])
    if "." not in file.stem and not file.stem.startswith("__") and _is_found_as(file.stem, file):
        return importlib.import_module(file.stem)
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"buffer_rl_file_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_found_as(name: str, file: Path) -> bool:
    loaded = sys.modules.get(name)
    try:
        found = getattr(loaded, "__file__", None) if loaded else getattr(importlib.util.find_spec(name), "origin", None)
        return found is not None and os.path.samefile(found, file)
    except (OSError, ValueError):  # "built-in", "frozen"; a module of the user's making
        return False


def _guarded(search: Search, load: Callable[[], ModuleType], file: str) -> ModuleType:
    """The fault boundary around the import of foreign code: whatever it raises becomes a PluginError."""
    importlib.invalidate_caches()
    try:
        with contained():  # a script without a main guard may call sys.exit
            return load()
    except PluginError:
        raise
    except Exception as error:
        text = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else error_name(error)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        what = f"its own import failed: {text}"
        hint = f"install what provides {missing!r}, or mend the import" if missing else ""
        raise search.error(what, origin=_place_of(original(error), file), hint=hint) from error


def _place_of(error: BaseException, file: str) -> str:
    """``file:line`` of a syntax error, else of the deepest line of the module's own file, else of the raise itself."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shorten(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file and os.path.abspath(frame.filename) == os.path.abspath(file)]
    if not own:
        return shorten(file)
    return f"{shorten(own[-1].filename)}:{own[-1].lineno}"
