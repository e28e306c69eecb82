"""Import what a reference names. An import that fails shows its own error with file and line, never "not found"."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from buffer_rl.errors import PluginError
from buffer_rl.resolution.errors import nearest
from buffer_rl.resolution.locate import Search
from buffer_rl.resolution.reference import Origin, shorten


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
            raise search.error(
                f"{owner} has no {part!r}" + (f"; the nearest name is {match!r}" if match else ""),
                origin=str(origin),
                known=[name for name in names if callable(getattr(target, name, None))],
            )
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
    """Run a file as a module of a name of its own, once a process. Its folder goes to the end of ``sys.path``."""
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"buffer_rl_file_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not Python source")
    append_to_path([str(file.parent)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _guarded(search: Search, load: Callable[[], ModuleType], file: str) -> ModuleType:
    """The fault boundary around the import of foreign code: whatever it raises becomes a PluginError."""
    importlib.invalidate_caches()
    try:
        return load()
    except PluginError:
        raise
    except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit
        raise search.error(
            f"its own import failed: {_describe(error)}",
            origin=_place_of(error, file),
            hint=_import_hint(error),
        ) from error


def _describe(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def _import_hint(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install what provides {error.name!r}, or mend the import"
    return ""


def _place_of(error: BaseException, file: str) -> str:
    """``file:line`` of a syntax error, else of the deepest line of the module's own file, else of the raise itself."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shorten(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file and os.path.abspath(frame.filename) == os.path.abspath(file)]
    if not own:
        return shorten(file)
    return f"{shorten(own[-1].filename)}:{own[-1].lineno}"
