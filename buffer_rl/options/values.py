"""From the text of a flag, a variable or a YAML scalar to an option's value, and what type an option wants.

All three sources read alike: a value in a file means what the same text means on the command line.
"""

from __future__ import annotations

import json
import os
import shlex
import types
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from buffer_rl.errors import ConfigError

Raw = str | list[str] | dict[str, Any] | None
"""A value before conversion: a text, several texts (flags and YAML sequences), a YAML mapping, or YAML null."""

_TYPE_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false"}
_METAVARS = {int: "INT", float: "NUM", str: "TEXT", bool: "BOOL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionType:
    """An option's annotation, taken apart.

    base: int, float, str, bool, or anything that pydantic knows; the item's type where ``many``.
    choices: the values of a ``Literal``. limits: constraints in words, for example ``>= 1``.
    """

    base: Any
    optional: bool
    many: bool
    mapping: bool
    choices: tuple[Any, ...]
    limits: tuple[str, ...]

    def __str__(self) -> str:
        """In words: ``integer >= 1, or none``."""
        if self.choices:
            words = "one of " + ", ".join(str(choice) for choice in self.choices)
        elif self.mapping:
            words = "mapping (NAME=VALUE,..., JSON or FILE.yaml)"
        else:
            words = _TYPE_WORDS.get(self.base, getattr(self.base, "__name__", str(self.base)))
        if self.many:
            words = f"list of {words}"
        if self.limits:
            words = f"{words} {' and '.join(self.limits)}"
        return f"{words}, or none" if self.optional else words

    @property
    def metavar(self) -> str:
        """What ``--help`` shows in the place of the value."""
        if self.choices:
            return "{" + ",".join(str(choice) for choice in self.choices) + "}"
        return "JSON" if self.mapping else _METAVARS.get(self.base, "VALUE")


def option_type(field: FieldInfo) -> OptionType:
    """The type of an option, from its field."""
    members = [field.annotation]
    if get_origin(field.annotation) in (Union, types.UnionType):
        members = list(get_args(field.annotation))
    optional = type(None) in members
    rest = [member for member in members if member is not type(None)]
    base: Any = rest[0] if len(rest) == 1 else field.annotation
    many = get_origin(base) in (list, tuple) or base in (list, tuple)
    if many:
        base = (*get_args(base), str)[0]
    mapping = base is dict or get_origin(base) is dict
    choices = get_args(base) if get_origin(base) is Literal else ()
    return OptionType(base=base, optional=optional, many=many, mapping=mapping, choices=choices, limits=_limits(field))


def convert(wanted: OptionType, raw: Raw) -> Any:
    """The value to validate. What does not convert is returned as it is, for validation to refuse.

    ``none`` is None where the option may be None; a text for a list is a JSON list or words split as a shell does; a
    text for a mapping is JSON, ``name=value`` pairs joined by commas, or the path of a YAML file.
    """
    if raw is None:
        return None
    if isinstance(raw, str):
        if wanted.optional and raw.lower() == "none" and "none" not in wanted.choices:
            return None
        if wanted.many:
            raw = _split(raw)
        elif wanted.mapping:
            return _mapping(raw)
    if isinstance(raw, list):
        if not wanted.many:
            return raw
        if wanted.optional and [item.lower() for item in raw if isinstance(item, str)] == ["none"]:
            return None
        return [_one(wanted, item) for item in raw]
    return _one(wanted, raw)


def mapping_of(field: FieldInfo, raw: Raw, where: str) -> dict[str, Any]:
    """The value of a mapping option, to which items are added. Raises ConfigError if it is none."""
    value = convert(option_type(field), raw)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{raw!r} is no mapping", where=where, expected="NAME=VALUE,..., JSON or FILE.yaml")
    return value


def _one(wanted: OptionType, raw: Any) -> Any:
    by_text = {str(choice): choice for choice in wanted.choices}
    return by_text.get(raw, raw) if isinstance(raw, str) else raw


def _split(text: str) -> list[str] | Any:
    if text.lstrip().startswith("["):
        return _json_or_text(text)
    try:
        return shlex.split(text)
    except ValueError:  # an open quote
        return [text]


def _mapping(text: str) -> Any:
    pairs = [pair.partition("=") for pair in text.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    plain = not text.lstrip().startswith("{") and all(equals for _, equals, _ in pairs) and all(names)
    if plain and len(set(names)) == len(names):
        return {name: value.strip() for name, (_, _, value) in zip(names, pairs, strict=True)}
    if text.endswith((".yaml", ".yml")) and not text.lstrip().startswith("{"):
        return _of_file(text)
    return _json_or_text(text)


def _of_file(path: str) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError with ``file:line``."""
    from buffer_rl.options.yaml_file import parse_yaml, plain_value  # which reads its options with this module

    path = os.path.expanduser(path)
    root = parse_yaml(path)
    value = {} if root is None else plain_value(path, root, os.environ)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError("the file is not a mapping", where=path, expected="lines of 'name: value'")
    return value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _limits(field: FieldInfo) -> tuple[str, ...]:
    words = []
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Ge):
            words.append(f">= {limit.ge}")
        elif isinstance(limit, annotated_types.Gt):
            words.append(f"> {limit.gt}")
        elif isinstance(limit, annotated_types.Le):
            words.append(f"<= {limit.le}")
        elif isinstance(limit, annotated_types.Lt):
            words.append(f"< {limit.lt}")
    return tuple(words)
