"""Does an object meet the contract of its plugin kind? Looks at signatures and methods; never calls the object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from buffer_rl.errors import PluginError, short_repr
from buffer_rl.kinds.kind import PluginKind
from buffer_rl.kinds.table import KINDS, kind_named
from buffer_rl.plugin.calls import plugin_error

# A class is a function that returns an object: right for kinds whose result is an object, and for rollouts,
# where the class is constructed and the instance is called.
_KINDS_THAT_RETURN_OBJECTS = frozenset({"engine", "router", "model_provider"})


def check_contract(kind: str, obj: object, reference: str = "") -> None:
    """Check that ``obj`` can serve as a plugin of ``kind``, by its signature and methods.

    Raises PluginError with the expected and the actual signature, ConfigError for an unknown kind.
    """
    row = kind_named(kind)
    name = reference or describe(obj)
    if not callable(obj):
        raise plugin_error(row, name, f"{type(obj).__name__} is not callable", actual=short_repr(obj))
    if row.constructed:
        _check_constructed(row, obj, name)
    elif inspect.isclass(obj):
        _check_class(row, obj, name)
    else:
        _check_function(row, obj, name)


def fitting_kinds(obj: object) -> list[str]:
    """The kinds whose contract ``obj`` meets, those whose arguments have the very names of the contract first.

    Where nearly everything would fit, less is guessed: a function as the factory of a constructed kind never, a
    function for a kind that returns any object only if it has the names.
    """
    is_class = inspect.isclass(obj)
    fitting = [kind for kind, row in KINDS.items() if (is_class or not row.constructed) and _fits(kind, obj)]
    named = [kind for kind in fitting if _has_names_of(KINDS[kind], obj)]
    others = [kind for kind in fitting if kind not in named and (is_class or kind not in _KINDS_THAT_RETURN_OBJECTS)]
    return named + others


def describe(obj: object) -> str:
    """``module:qualname`` of a function or class (of the one inside a partial), or of the class of an instance."""
    obj = inner_function(obj)
    named = obj if hasattr(obj, "__qualname__") else type(obj)
    return f"{named.__module__}:{named.__qualname__}"


def inner_function(obj: object) -> object:
    """The function inside any number of ``functools.partial``."""
    while isinstance(obj, functools.partial):
        obj = obj.func
    return obj


def call_rollout(function: Any, args: Any, rollout_id: int, buffer: Any, evaluation: bool) -> Any:
    """Call a checked rollout function; ``evaluation`` goes by keyword where it can, else by position."""
    if _bind_error(function, 3, ("evaluation",)) is None:
        return function(args, rollout_id, buffer, evaluation=evaluation)
    return function(args, rollout_id, buffer, evaluation)


def takes_evaluation(function: Any) -> bool:
    """Whether a generate function has a parameter ``evaluation``; ``**kwargs``, which it may pass on, is none."""
    signature = _signature(function)
    return signature is not None and "evaluation" in signature.parameters


def keywords_for(function: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``given``, the keywords that a function takes; all, if it takes any or its signature is unknown."""
    signature = _signature(function)
    parameters = {} if signature is None else signature.parameters
    if signature is None or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def takes(function: Any, num_positional: int) -> bool:
    """Whether a function can be called with that many positional arguments; True if its signature is unknown."""
    return _bind_error(function, num_positional) is None


def _check_function(row: PluginKind, function: Any, reference: str) -> None:
    # inspect looks through a functools.partial by itself; other callable objects are what their __call__ is.
    called = function.__call__
    if any(inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f) for f in (function, called)):
        raise _wrong(row, reference, "it is a generator: it must return, not yield", function)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    if is_async and not row.may_be_async:
        what = f"a {row.name} cannot be async"
        raise plugin_error(row, reference, what, actual=f"async {signature_of(function)}", hint="use def")
    problem = _bind_error(function, len(row.positional), optional=row.optional)
    if problem and row.name in ("rollout", "generate"):
        problem = _bind_error(function, 3, ("evaluation",)) and problem
    if problem and not (row.keywords and set(row.keywords) <= inspect.signature(function).parameters.keys()):
        asked = ", ".join(row.positional)
        raise _wrong(row, reference, f"it cannot be called with ({asked}): {problem}", function)


def _check_class(row: PluginKind, cls: type, reference: str) -> None:
    if row.name in _KINDS_THAT_RETURN_OBJECTS:
        _check_construction(row, cls, reference, row.positional)
        return
    if row.name != "rollout":
        raise _wrong(row, reference, "it is a class", cls, hint="name a function, or an instance of the class")
    _check_construction(row, cls, reference, ("args",))
    call = _unbound_method(cls, "__call__")
    if call is None:
        raise _wrong(row, reference, "the class has no __call__", cls)
    _check_function(row, call, reference)


def _check_constructed(row: PluginKind, factory: Any, reference: str) -> None:
    if inspect.iscoroutinefunction(factory):
        raise plugin_error(row, reference, "it is async", actual=f"async {signature_of(factory)}")
    _check_construction(row, factory, reference, row.positional)
    if not inspect.isclass(factory):
        return  # a factory: what it builds is checked by its use
    missing = [name for name in row.methods if not callable(getattr(factory, name, None))]
    missing += [name for name in row.attributes if not hasattr(factory, name)]
    hint = row.changed_hint(factory)
    if missing or hint:
        what = f"the class lacks {', '.join(missing)}" if missing else "the class is of an earlier contract"
        raise _wrong(row, reference, what, factory, hint=hint)
    for name in row.methods:
        _check_method(row, factory, name, reference)


def _check_construction(row: PluginKind, factory: Any, reference: str, positional: tuple[str, ...]) -> None:
    if inspect.isabstract(factory):
        missing = ", ".join(sorted(factory.__abstractmethods__))
        raise _wrong(row, reference, f"the class is abstract: {missing}", factory)
    if problem := _bind_error(factory, len(positional), optional=row.optional):
        what = f"it cannot be constructed with ({', '.join(positional)}): {problem}"
        raise _wrong(row, reference, what, factory, hint=row.newest_hint)


def _check_method(row: PluginKind, cls: type, name: str, reference: str) -> None:
    """The class's method takes what the Protocol's method takes."""
    contract = _signature(getattr(row.protocol, name, None))
    method = _unbound_method(cls, name)
    if inspect.iscoroutinefunction(method) and not row.may_be_async:
        raise plugin_error(row, reference, f"its method {name} is async", actual=f"async {signature_of(method)}")
    if contract is None or any(p.kind is p.VAR_KEYWORD for p in contract.parameters.values()):
        return  # with names that depend on the data
    asked = [p for p in contract.parameters.values() if p.name != "self"]
    if problem := _bind_error(method, len(asked)):
        names = ", ".join(p.name for p in asked)
        what = f"its method {name} cannot be called with ({names}): {problem}"
        raise _wrong(row, reference, what, method, hint=row.newest_hint)


def _wrong(row: PluginKind, reference: str, what: str, found: Any, hint: str = "") -> PluginError:
    return plugin_error(row, reference, what, actual=signature_of(found), hint=hint)


def _unbound_method(cls: type, name: str) -> Any:
    """What ``instance.name`` would be, as a callable without ``self``; None where the class has no such method."""
    static = inspect.getattr_static(cls, name, None)
    if inspect.isfunction(static):
        return static.__get__(object())  # bound to anything: only the signature is read
    return getattr(cls, name) if isinstance(static, staticmethod | classmethod) else None


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def signature_of(function: Any) -> str:
    """``name(parameters)`` for a message, without annotations."""
    name = getattr(function, "__name__", type(function).__name__)
    signature = _signature(function)
    if signature is None:
        return f"{name}(...)"
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}"


def _bind_error(function: Any, positional: int, keywords: tuple[str, ...] = (), *, optional: int = 0) -> str | None:
    """Why a call with that many positional arguments and these keywords fails; None where it works, also without the
    last ``optional`` arguments, or where the signature is unknown."""
    if (signature := _signature(function)) is None:  # of a builtin
        return None
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error) if not optional or _bind_error(function, positional - optional) else None
    return None


def _fits(kind: str, obj: object) -> bool:
    try:
        check_contract(kind, obj)
    except PluginError:
        return False
    return True


def _has_names_of(row: PluginKind, obj: object) -> bool:
    call = _unbound_method(obj, "__call__") if inspect.isclass(obj) and row.name == "rollout" else obj
    signature = _signature(call)
    if signature is None:
        return False
    names = tuple(signature.parameters)
    return any(form and names[: len(form)] == form for form in (row.positional, row.keywords))
