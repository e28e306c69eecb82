"""The one place where a plugin reference becomes an object: paths, installed names and hooks through one registry.

A reference is tried in this order: a Python object; ``package.module:attr``; ``./file.py:attr``; a registered
name or an entry-point name; ``package.module.attr``. Whatever the route, the object is checked against the
contract of its kind and registered in one pluggy ``PluginManager``, so that one list shows what is loaded.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import pluggy

from buffer_rl.errors import PluginError
from buffer_rl.kinds.kind import PluginKind
from buffer_rl.kinds.table import KINDS, kind_named
from buffer_rl.plugin.calls import nearest, plugin_error
from buffer_rl.plugin.entry_points import (
    AUTOLOAD_VARIABLE,
    HOOK_GROUP,
    EntryPointInfo,
    EntryPoints,
    PluginInfo,
    origin_of_object,
)
from buffer_rl.plugin.hooks import Adapter, HookPlugins, Provided
from buffer_rl.plugin.import_names import ImportNames
from buffer_rl.plugin.locate import Search, import_object
from buffer_rl.plugin.reference import Form, Origin, find_module, form_of
from buffer_rl.plugin.shipping import search_folders
from buffer_rl.plugin.signature import check_contract, describe, inner_function

__all__ = ["Origin", "PluginInfo", "PluginRegistry", "check_contract"]


class PluginRegistry:
    """Finds, checks and lists the plugins of one process.

    blocked: names of plugins, entry points, references or whole distributions that must not be used
        (``-p no:NAME``).
    autoload: whether other distributions' entry points count; off too where the environment variable
        ``BUFFER_RL_DISABLE_PLUGIN_AUTOLOAD`` is set. buffer_rl's own names stay.
    search_path: folders searched after ``sys.path``, and for relative files; where None, the working directory, and
        before it the code that came with the run to this node.
    """

    def __init__(
        self, *, blocked: Iterable[str] = (), autoload: bool = True, search_path: Sequence[str] | None = None
    ) -> None:
        self._folders = tuple(os.path.abspath(folder) for folder in search_path or search_folders())
        autoload = autoload and not os.environ.get(AUTOLOAD_VARIABLE)
        self._entry_points = EntryPoints(blocked=blocked, autoload=autoload)
        self._plugins = HookPlugins(entry_points=self._entry_points, folders=self._folders)
        self._import_names = ImportNames(self._entry_points, self._folders)
        self._resolved: dict[tuple[str, str], Adapter] = {}

    @classmethod
    def from_flags(cls, plugin: Iterable[str]) -> PluginRegistry:
        """A registry as ``-p`` says: ``no:NAME`` blocks, anything else is loaded. Raises PluginError."""
        flags = list(plugin)
        registry = cls(blocked=[flag.removeprefix("no:") for flag in flags if flag.startswith("no:")])
        for flag in flags:
            if not flag.startswith("no:"):
                registry.load_plugin(flag)
        return registry

    @property
    def manager(self) -> pluggy.PluginManager:
        """The pluggy manager that everything is registered in."""
        return self._plugins.manager

    def call_hook(self, hook: str, **facts: object) -> list[tuple[str, Any]]:
        """Call a lifecycle hook of every loaded plugin. Returns pairs of plugin and answer.

        Raises PluginError naming the plugin whose hook raised.
        """
        return self._plugins.call(hook, **facts)

    def load_plugin(self, reference: str) -> None:
        """Load one requested pluggy plugin (``-p``): an installed name, a module or ``module:attr``; or provide the
        import name ``reference`` (``buffer_rl.plugin.import_names``).

        Raises PluginError if it is broken; broken plugins that are only installed are skipped.
        """
        if not self._import_names.request(reference):
            self._plugins.load(reference)

    def names(self, kind: str) -> list[str]:
        """The names that are registered or installed for a kind."""
        kind_named(kind)
        return sorted(self._candidates(kind))

    def locate(self, kind: str, reference: object) -> Origin:
        """Where a reference leads, without importing what it names. Raises PluginError if it leads nowhere."""
        row = kind_named(kind)
        if not isinstance(reference, str):
            return origin_of_object(kind, describe(reference), reference)
        if self._entry_points.is_blocked(reference):
            raise plugin_error(row, reference, f"blocked by -p no:{reference}")
        form = form_of(reference)
        if form in (Form.MODULE, Form.DOTTED):
            self._import_names.provide([reference.partition(":")[0]])
        search = Search(kind=row, shown=reference, folders=self._folders)
        if form in (Form.MODULE, Form.FILE):
            return search.locate(reference)
        candidate = self._named(row, reference)
        if isinstance(candidate, Provided):
            return origin_of_object(kind, reference, candidate.object, provider=candidate.provider)
        if candidate is not None:
            origin = search.locate(candidate.target)
            return replace(origin, form=Form.NAME, distribution=candidate.distribution, version=candidate.version)
        if form is Form.NAME and find_module(reference, self._folders) is None:
            raise self._unknown_name(row, reference)
        return replace(search, known=tuple(self.names(kind))).locate(reference)

    def resolve(self, kind: str, reference: object) -> Any:
        """The checked object behind a reference; the same object for the same reference. Raises PluginError."""
        row = kind_named(kind)
        name = reference if isinstance(reference, str) else describe(reference)
        known = self._resolved.get((kind, name))
        if known is not None and (isinstance(reference, str) or known.held is reference):
            return known.held
        origin = self.locate(kind, reference)
        obj = self._load(row, reference, origin)
        try:
            check_contract(kind, obj, name)
        except PluginError as error:
            error.where = f"{error.where} ({origin})"
            raise
        adapter = Adapter(origin, obj)
        if known is None:  # another object of the same name is used, but not listed twice
            self._resolved[kind, name] = adapter
            self._plugins.add_adapter(adapter)
        return obj

    def load(self, reference: str) -> Any:
        """Import a path reference without checking it against any kind. Raises PluginError."""
        if self._entry_points.is_blocked(reference):
            raise plugin_error(None, reference, f"blocked by -p no:{reference}")
        known = tuple(sorted({name for kind in KINDS for name in self._candidates(kind)}))
        search = Search(kind=None, shown=reference, folders=self._folders, known=known)
        if form_of(reference) is Form.NAME and find_module(reference, self._folders) is None:
            raise search.error("no kind has this name", suggestion=nearest(reference, search.known), known=search.known)
        return import_object(search, search.locate(reference))

    def resolve_registered(self, kind: str, name: str) -> Any:
        """As ``resolve``, for names that come from data: a registered name, never a path to code."""
        row = kind_named(kind)
        names = self.names(kind)
        if name in names:
            return self.resolve(kind, name)
        if form_of(name) is Form.NAME:
            raise self._unknown_name(row, name, otherwise="")
        raise plugin_error(row, name, "data may choose only registered names, never a path to code", known=names)

    def is_written_for_others(self, obj: object) -> bool:
        """Whether the source of a function imports a package whose names a plugin provides, installed or not."""
        try:
            file = inspect.getsourcefile(inspect.unwrap(cast("Any", inner_function(obj))))
        except TypeError:  # an object that is no function: its class says it
            file = inspect.getsourcefile(type(obj))
        return self._import_names.are_asked_by(file or "")

    def infos(self, kind: str | None = None) -> list[PluginInfo]:
        """Every plugin that is installed, provided or resolved; nothing is imported but installed pluggy plugins."""
        kinds = [kind_named(kind).name] if kind else list(KINDS)
        rows = {(info.kind, info.name): info for each in kinds for info in self._infos_of(each)}
        if kind is None:
            for name, plugin in self._plugins.plugins():
                rows["", name] = PluginInfo.of(origin_of_object("", name, plugin), loaded=True)
            for name, problem in self._plugins.broken.items():
                rows["", name] = PluginInfo(kind="", name=name, error=problem)
            for entry in self._entry_points.foreign(KINDS):
                what = f"{HOOK_GROUP}.{entry.kind} is no group of entry points"
                near = nearest(entry.kind, KINDS)
                error = f"{what}; did you mean {HOOK_GROUP}.{near}?" if near else what
                rows[entry.kind, entry.name] = PluginInfo(**asdict(entry), error=error)
        return sorted(rows.values(), key=lambda info: (info.kind, info.name))

    def _infos_of(self, kind: str) -> Iterator[PluginInfo]:
        for name, candidates in self._candidates(kind).items():
            try:
                yield PluginInfo.of(self.locate(kind, name), loaded=(kind, name) in self._resolved)
            except PluginError as error:
                yield PluginInfo(kind=kind, name=name, target=" and ".join(map(str, candidates)), error=str(error))
        for entry in self._entry_points.all(kind):
            if reason := self._entry_points.refusal(entry):
                yield PluginInfo(**asdict(entry), error=reason)
        for (resolved_kind, _), adapter in self._resolved.items():
            if resolved_kind == kind:
                yield PluginInfo.of(adapter.origin, loaded=True)

    def _load(self, row: PluginKind, reference: object, origin: Origin) -> object:
        if not isinstance(reference, str):
            return reference
        if origin.provider:
            candidate = self._named(row, reference)
            assert isinstance(candidate, Provided)
            return candidate.object
        search = Search(kind=row, shown=reference, folders=self._folders)
        self._import_names.provide_for(origin.file)
        try:
            return import_object(search, origin)
        except PluginError as error:
            if not self._import_names.provide_missing(error.__cause__):
                raise
        return import_object(search, origin)

    def _candidates(self, kind: str) -> dict[str, list[EntryPointInfo | Provided]]:
        """Every name of a kind with all that have it."""
        found: dict[str, list[EntryPointInfo | Provided]] = {}
        for entry in self._entry_points.usable(kind):
            found.setdefault(entry.name, []).append(entry)
        for name, providers in self._plugins.provided(kind).items():
            found.setdefault(name, []).extend(providers)
        return found

    def _named(self, row: PluginKind, name: str) -> EntryPointInfo | Provided | None:
        """What has a name; None if nothing does. Raises PluginError naming all of several."""
        candidates = self._candidates(row.name).get(name, [])
        if len(candidates) > 1:
            what = f"several plugins have this name: {' and '.join(map(str, candidates))}"
            hint = "write module:function, or block one distribution with -p no:DISTRIBUTION"
            raise plugin_error(row, name, what, hint=hint)
        return candidates[0] if candidates else None

    def _unknown_name(self, row: PluginKind, name: str, *, otherwise: str = "or write module:function") -> PluginError:
        refused = [entry for entry in self._entry_points.all(row.name) if entry.name == name]
        if refused:
            reasons = "; ".join(f"{entry}: {self._entry_points.refusal(entry)}" for entry in refused)
            return plugin_error(row, name, f"the name is installed, but {reasons}")
        names = self.names(row.name)
        broken = ", ".join(sorted(self._plugins.broken))
        what = f"there is no {row.name} of that name"
        hint = f"these plugins are broken: {broken}" if broken else otherwise
        return plugin_error(row, name, what, suggestion=nearest(name, names), known=names, hint=hint)
