"""What installed distributions bring: the entry points of buffer_rl's groups, read without importing what they name."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from buffer_rl.plugin.reference import Form, Origin
from buffer_rl.plugin.signature import describe, inner_function

AUTOLOAD_VARIABLE = "BUFFER_RL_DISABLE_PLUGIN_AUTOLOAD"
OWN_DISTRIBUTION = "buffer-rl"
NAMES_GROUP = "buffer_rl.names"
"""Entry points of this group, of buffer_rl itself alone, are tables: by kind, references by name."""
HOOK_GROUP = "buffer_rl"
"""Entry points of this group are pluggy plugins; those of a kind stand in ``buffer_rl.<kind>``."""

OTHER_GROUPS = ("names", "verb", "import_names")
"""Groups beside those of kinds, each after ``buffer_rl.``."""


@dataclass(frozen=True, slots=True)
class EntryPointInfo:
    """One entry point. ``kind`` is empty for a pluggy plugin; ``distribution`` is the normalised name. target: its
    value, ``module:attr``."""

    kind: str
    name: str
    target: str
    distribution: str
    version: str

    @property
    def is_own(self) -> bool:
        """Whether it comes with buffer_rl itself."""
        return self.distribution == OWN_DISTRIBUTION

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.target})"


def normalise(distribution: str) -> str:
    """A distribution's name in the form in which two spellings are equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


class EntryPoints:
    """What is installed, and what of it may be used.

    blocked: names of entry points or of distributions. autoload: whether other distributions count at all.
    """

    def __init__(self, *, blocked: Iterable[str] = (), autoload: bool = True) -> None:
        self._blocked = frozenset(blocked)
        self._blocked_distributions = frozenset(normalise(name) for name in self._blocked)
        self._autoload = autoload

    @functools.cached_property
    def _read(self) -> tuple[list[EntryPointInfo], dict[str, str]]:
        return _read_entry_points(tuple((folder, _changed_at(folder)) for folder in sys.path))

    @property
    def broken(self) -> dict[str, str]:
        """Distributions whose entry points cannot be read, and why."""
        return self._read[1]

    def usable(self, kind: str) -> list[EntryPointInfo]:
        """The entry points of ``kind`` (empty: the pluggy plugins) that are neither blocked nor switched off."""
        return [entry for entry in self.all(kind) if not self.refusal(entry)]

    def all(self, kind: str) -> list[EntryPointInfo]:
        """The entry points of ``kind``, usable or not."""
        return [entry for entry in self._read[0] if entry.kind == kind]

    def foreign(self, kinds: Collection[str]) -> list[EntryPointInfo]:
        """The entry points of others in groups of no kind, such as a misspelt one."""
        known = {"", *kinds, *OTHER_GROUPS}
        return [entry for entry in self._read[0] if entry.kind not in known and not self.refusal(entry)]

    def refusal(self, entry: EntryPointInfo) -> str:
        """Why an entry point may not be used; empty if it may."""
        if not self._autoload and not entry.is_own:
            return f"not loaded, because {AUTOLOAD_VARIABLE} is set or autoload is off"
        return self.block(entry)

    def block(self, entry: EntryPointInfo) -> str:
        """Which ``-p no:NAME`` blocks an entry point; empty if none does."""
        if entry.name in self._blocked:
            return f"blocked by -p no:{entry.name}"
        if entry.distribution in self._blocked_distributions:
            return f"blocked by -p no:{entry.distribution}"
        return ""

    def is_blocked(self, name: str) -> bool:
        """Whether a name or a whole reference was blocked."""
        return name in self._blocked


def _changed_at(folder: str) -> int:
    try:
        return Path(folder or ".").stat().st_mtime_ns
    except OSError:  # no such folder; an archive has no folder either, and is not written to while it is in use
        return 0


@functools.lru_cache(maxsize=8)
def _read_entry_points(folders: tuple[tuple[str, int], ...]) -> tuple[list[EntryPointInfo], dict[str, str]]:
    """The entry points of all distributions on ``sys.path``, and what is wrong with unreadable ones, by distribution.

    Of two copies of one distribution, the first counts, as in imports. folders: those of the path, and when each was
    changed; the entry points are read again if one was.
    """
    found: list[EntryPointInfo] = []
    broken: dict[str, str] = {}
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            entries = [entry for entry in distribution.entry_points if entry.group.partition(".")[0] == HOOK_GROUP]
        except Exception as error:  # the fault boundary around metadata that others wrote by hand
            if HOOK_GROUP in (distribution.read_text("entry_points.txt") or ""):
                broken[_name_of(distribution)] = f"its entry_points.txt cannot be read: {error}"
            continue
        if entries and (name := _name_of(distribution)) not in seen:
            seen.add(name)
            found.extend(_infos_of(name, distribution.version or "", entries))
    return found, broken


def _name_of(distribution: importlib.metadata.Distribution) -> str:
    return normalise(distribution.metadata["Name"] or "unknown")


def _infos_of(
    distribution: str, version: str, entries: Iterable[importlib.metadata.EntryPoint]
) -> list[EntryPointInfo]:
    rows: list[tuple[str, str, str]] = []
    for entry in entries:
        if entry.group == NAMES_GROUP and distribution == OWN_DISTRIBUTION:
            rows += [(kind, name, value) for kind, table in entry.load().items() for name, value in table.items()]
        else:
            kind = entry.group.removeprefix(HOOK_GROUP).removeprefix(".")
            rows.append((kind, entry.name, entry.value.partition("[")[0].replace(" ", "")))
    return [EntryPointInfo(kind, name, target, distribution, version) for kind, name, target in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """One row of ``buffer-rl plugins list``.

    kind: empty for a whole pluggy plugin. name: what a user writes. target: ``module:attr`` behind it.
    sha256: of ``file`` as it is on disk now, hexadecimal. error: why it cannot be used; empty if it can, as far
    as one sees without importing it.
    """

    kind: str
    name: str
    target: str = ""
    distribution: str = ""
    version: str = ""
    provider: str = ""
    file: str = ""
    line: int | None = None
    sha256: str = ""
    loaded: bool = False
    error: str = ""

    @classmethod
    def of(cls, origin: Origin, *, loaded: bool) -> PluginInfo:
        """The row of a plugin that leads to ``origin``."""
        distribution, version, file = origin.distribution, origin.version, Path(origin.file)
        if not distribution and origin.module:
            distribution, version = distribution_of(origin.module)
        return cls(
            kind=origin.kind,
            name=origin.reference,
            target=":".join(part for part in (origin.module or origin.file, origin.attr) if part),
            distribution=distribution,
            version=version,
            provider=origin.provider,
            file=origin.file,
            line=origin.line,
            sha256=hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
            loaded=loaded,
        )


def distribution_of(module: str) -> tuple[str, str]:
    """Name and version of the installed distribution that brings a module; empty for a user's own file."""
    top = module.partition(".")[0]
    if top in {OWN_DISTRIBUTION.replace("-", "_"), "rm_hub", "filter_hub"}:  # an editable install does not list them
        names = [OWN_DISTRIBUTION]
    else:
        names = importlib.metadata.packages_distributions().get(top, [])
    try:
        return (normalise(names[0]), importlib.metadata.version(names[0])) if names else ("", "")
    except importlib.metadata.PackageNotFoundError:
        return "", ""


def origin_of_object(kind: str, reference: str, obj: object, *, provider: str = "") -> Origin:
    """Where a Python object was defined, as far as inspect finds it."""
    obj = inner_function(obj)
    target = obj if inspect.isclass(obj) or inspect.isroutine(obj) or inspect.ismodule(obj) else type(obj)
    try:
        file = inspect.getsourcefile(target) or ""
    except TypeError:  # builtins have no source
        file = ""
    code = getattr(target, "__code__", None)
    module, _, attr = (target.__name__, "", "") if inspect.ismodule(target) else describe(obj).partition(":")
    return Origin(
        kind=kind,
        reference=reference,
        form=Form.NAME if provider else Form.OBJECT,
        module=module,
        attr=attr,
        file=file,
        line=code.co_firstlineno if code is not None else None,
        verified=True,
        provider=provider,
    )
