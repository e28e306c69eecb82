"""What the table of plugin kinds says of a kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

Power = TypeVar("Power")


def implements(built: object, power: Callable[..., Power]) -> TypeGuard[Power]:
    """Whether an object of a constructed kind has all methods and attributes of the Protocol ``power``.

    From Python 3.12 on, ``isinstance`` does not see what an object gets by ``__getattr__``, which a guarded one does.
    """
    return not absent_of(built, power)


def absent_of(built: object, power: Any) -> list[str]:
    """The names that ``implements`` does not find."""
    return [name for name in vars(power) if not name.startswith("_") and not hasattr(built, name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginKind:
    """One row of the table of plugin kinds. Its arguments, or its methods, are those of its ``protocol``.

    constructed: for kinds that are classes, the arguments that the class (or a factory) is called with.
    attributes: names of the class beside its methods.
    optional: how many of the last positional arguments a function or a constructor may leave out.
    keywords: what some callers pass by name in place of all positional ones, with others; a function that has
    parameters of these names will do.
    changed: methods of earlier contracts, which are never called, with the hint for an object that has one.
    """

    name: str
    flags: tuple[str, ...]
    protocol: type
    signature: str
    optional: int = 0
    keywords: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    constructed: tuple[str, ...] = ()
    may_be_async: bool = False
    changed: Mapping[str, str] = field(default_factory=dict)

    @property
    def positional(self) -> tuple[str, ...]:
        """Names of the positional arguments that a function or class of this kind is called with."""
        return self.constructed or tuple(inspect.signature(self.protocol.__call__).parameters)[1:]

    @property
    def methods(self) -> tuple[str, ...]:
        """For kinds that are classes, the methods that an object must have."""
        items = vars(self.protocol).items() if self.constructed else ()
        functions = (name for name, item in items if inspect.isfunction(item))
        return tuple(name for name in functions if name == "__len__" or not name.startswith("_"))  # others are typing's

    @property
    def newest_hint(self) -> str:
        """What changed in the contract last; empty where nothing did."""
        return next(iter(self.changed.values()), "")

    def changed_hint(self, obj: object) -> str:
        """The hint for an object of an earlier contract; empty for any other. A method that a base class of the
        framework has is none of an earlier contract."""
        bases = (obj if isinstance(obj, type) else type(obj)).__mro__
        ours = [base for base in bases if base.__module__.startswith("buffer_rl.")]
        found = (m for m in self.changed if hasattr(obj, m) and not any(hasattr(base, m) for base in ours))
        return self.changed[method] if (method := next(found, None)) else ""
