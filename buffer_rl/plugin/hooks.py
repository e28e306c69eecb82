"""The pluggy plugins of a process: loading them, checking their hooks, and the names that they provide."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pluggy

from buffer_rl.errors import PluginError, short_repr
from buffer_rl.plugin.calls import call, contained, error_name, nearest, plugin_error
from buffer_rl.plugin.entry_points import EntryPoints
from buffer_rl.plugin.hookspecs import PROJECT_NAME, Hooks, hookimpl
from buffer_rl.plugin.locate import Search, import_module, import_object
from buffer_rl.plugin.reference import Form, Origin, form_of
from buffer_rl.plugin.signature import describe

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Adapter:
    """The small plugin that stands for one reference: it provides one object under that reference."""

    origin: Origin
    held: object

    @hookimpl
    def buffer_rl_provide(self, kind: str) -> Mapping[str, object]:
        """The object, for its kind."""
        return {self.origin.reference: self.held} if kind == self.origin.kind else {}


@dataclass(frozen=True, slots=True)
class Provided:
    """An object that a pluggy plugin provides under a name."""

    provider: str
    object: object

    def __str__(self) -> str:
        return f"plugin {self.provider} ({describe(self.object)})"


class HookPlugins:
    """One pluggy manager and what is registered in it.

    broken: plugins that could not be used, and why. folders: searched after ``sys.path``.
    """

    def __init__(self, *, entry_points: EntryPoints, folders: Sequence[str]) -> None:
        self.manager = pluggy.PluginManager(PROJECT_NAME)
        self.manager.add_hookspecs(Hooks)
        self.broken: dict[str, str] = {}
        self._entry_points = entry_points
        self._folders = folders
        self._provided: dict[tuple[str, str], Mapping[str, object]] = {}
        self._requested: set[str] = set()
        self._installed_loaded = False

    def add_adapter(self, adapter: Adapter) -> None:
        """Register an adapter under its reference; where another kind has it, under the reference and its kind."""
        reference = adapter.origin.reference
        taken = self.manager.has_plugin(reference)
        self.manager.register(adapter, f"{reference} as {adapter.origin.kind}" if taken else reference)

    def load(self, reference: str) -> None:
        """Load one requested plugin: an installed name, a module or ``module:attr``. Raises PluginError."""
        self._requested.add(reference)
        self._load(reference)

    def _load(self, reference: str) -> None:
        if reference in dict(self.plugins()):
            return
        named = [entry for entry in self._entry_points.all("") if entry.name == reference]
        entries = [entry for entry in named if not self._entry_points.block(entry)]
        if len(entries) > 1:
            raise plugin_error(None, reference, f"several distributions have it: {' and '.join(map(str, entries))}")
        if self._entry_points.is_blocked(reference) or (named and not entries):
            reason = self._entry_points.block(named[0]) if named else f"blocked by -p no:{reference}"
            raise plugin_error(None, reference, reason)
        known = tuple(entry.name for entry in self._entry_points.all(""))
        search = Search(kind=None, shown=reference, folders=self._folders, known=known)
        target = entries[0].target if entries else reference
        is_attribute = form_of(target) in (Form.MODULE, Form.FILE)
        plugin = import_object(search, search.locate(target)) if is_attribute else import_module(search, target)
        self._register(search, plugin)

    def load_installed(self) -> None:
        """Load every installed plugin, once. A broken one is named in the log and in ``broken``, and skipped."""
        if self._installed_loaded:
            return
        self._installed_loaded = True
        for distribution, problem in self._entry_points.broken.items():
            self._skip(distribution, problem)
        for name in dict.fromkeys(entry.name for entry in self._entry_points.usable("")):
            try:
                self._load(name)
            except PluginError as error:
                self._skip(name, str(error))

    def provided(self, kind: str) -> dict[str, list[Provided]]:
        """Names for ``kind``, and the providers of each; installed plugins are loaded first."""
        self.load_installed()
        found: dict[str, list[Provided]] = {}
        for provider, plugin in self.plugins():
            for name, obj in self._ask(provider, plugin, kind).items():
                if not self._entry_points.is_blocked(name):
                    found.setdefault(name, []).append(Provided(provider, obj))
        return found

    def call(self, hook: str, **facts: object) -> list[tuple[str, object]]:
        """Call a hook of every plugin, one plugin after another, in pluggy's order. Returns pairs of plugin and answer.

        Raises PluginError naming the plugin whose hook raised; errors of ``buffer_rl.errors`` pass as they are.
        """
        self.load_installed()
        answers: list[tuple[str, object]] = []
        for implementation in reversed(getattr(self.manager.hook, hook).get_hookimpls()):
            name, caller = implementation.plugin_name, self._caller(hook, implementation.plugin)
            answers += [(name, answer) for answer in call("plugin", name, partial(caller, **facts), at=hook)]
        return answers

    def plugins(self) -> list[tuple[str, object]]:
        """The loaded pluggy plugins by name, without the adapters."""
        return [
            (name, plugin)
            for name, plugin in self.manager.list_name_plugin()
            if plugin is not None and not isinstance(plugin, Adapter)
        ]

    def _register(self, search: Search, plugin: object) -> None:
        name = search.shown
        try:
            with contained():
                instance = plugin() if inspect.isclass(plugin) else plugin
                self.manager.register(instance, name)
        except Exception as error:  # the fault boundary around a constructor of others and pluggy's validation
            if name in dict(self.plugins()):  # pluggy registers first and validates then
                self.manager.unregister(name=name)
            raise search.error(f"it cannot be registered: {error_name(error)}") from error
        hooks = self.manager.get_hookcallers(instance) or []
        unknown = [hook.name for hook in hooks if not hook.has_spec()]
        if unknown or not hooks:
            self.manager.unregister(instance)
            specified = [hook for hook in dir(Hooks) if hook.startswith("buffer_rl_")]
            what = f"there is no hook {unknown[0]!r}" if unknown else "it implements no hook"
            suggestion = nearest(unknown[0], specified) if unknown else None
            hint = "" if unknown else "mark functions with buffer_rl.plugin.hookspecs.hookimpl"
            raise search.error(what, suggestion=suggestion, known=specified, hint=hint)

    def _ask(self, provider: str, plugin: object, kind: str) -> Mapping[str, object]:
        """What one plugin provides for a kind, asked once. One that fails is unloaded; others go on."""
        if (provider, kind) not in self._provided:
            answer: Mapping[str, object] = {}
            try:
                with contained():
                    parts = self._caller("buffer_rl_provide", plugin)(kind=kind)
                for part in parts:
                    if not isinstance(part, Mapping):
                        raise TypeError(f"buffer_rl_provide returned {short_repr(part)}, not a mapping")
                    answer = part
            except Exception as error:  # the fault boundary around code of others, run while names are listed
                problem = f"buffer_rl_provide({kind!r}) failed: {error_name(error)}"
                if provider in self._requested:
                    raise plugin_error(None, provider, problem) from error
                self.manager.unregister(plugin)
                self._skip(provider, problem)
            self._provided[provider, kind] = answer
        return self._provided[provider, kind]

    def _caller(self, hook: str, plugin: object) -> pluggy.HookCaller:
        others = [other for _, other in self.manager.list_name_plugin() if other not in (None, plugin)]
        return self.manager.subset_hook_caller(hook, remove_plugins=others)

    def _skip(self, name: str, problem: str) -> None:
        self.broken[name] = problem
        _log.warning("the plugin %s is skipped: %s", name, problem)
