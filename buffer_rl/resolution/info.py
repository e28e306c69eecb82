"""What is known of one plugin, for the list that users see."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from pathlib import Path

from buffer_rl.resolution.entry_points import OWN_DISTRIBUTION, normalise
from buffer_rl.resolution.reference import Form, Origin
from buffer_rl.resolution.signature import describe, inner_function


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
    def of(cls, origin: Origin, *, loaded: bool, error: str = "") -> PluginInfo:
        """The row of a plugin that leads to ``origin``."""
        distribution, version = origin.distribution, origin.version
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
            sha256=file_hash(origin.file),
            loaded=loaded,
            error=error,
        )


def distribution_of(module: str) -> tuple[str, str]:
    """Name and version of the installed distribution that brings a module; empty for a user's own file."""
    top = module.partition(".")[0]
    if top in {OWN_DISTRIBUTION.replace("-", "_"), "rm_hub", "filter_hub"}:  # an editable install does not say so
        names = [OWN_DISTRIBUTION]
    else:
        names = importlib.metadata.packages_distributions().get(top, [])
    try:
        return (normalise(names[0]), importlib.metadata.version(names[0])) if names else ("", "")
    except importlib.metadata.PackageNotFoundError:
        return "", ""


def file_hash(file: str) -> str:
    """SHA-256 of a file, hexadecimal; empty where there is no file."""
    path = Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest() if file and path.is_file() else ""


def origin_of_object(kind: str, reference: str, obj: object, *, provider: str = "") -> Origin:
    """Where a Python object was defined, as far as it tells."""
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
