"""From the text of a flag, a variable or a YAML scalar to an option's value, and what type an option wants.

All three sources read alike: a value in a file means what the same text means on the command line. A YAML file is one
flat mapping, every key with its line, ``${here}`` and ``${env:NAME}`` filled in.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from buffer_rl.errors import ConfigError, raised_as
from buffer_rl.options.file_kind import HEAD_BYTES, not_text
from buffer_rl.options.redaction import is_secret
from buffer_rl.options.section import did_you_mean, item_of_mapping

Raw = str | list[str] | dict[str, Any] | None
"""A value before conversion: a text, several texts (flags and YAML sequences), a YAML mapping, or YAML null."""

_TYPE_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false"}
_METAVARS = {int: "INT", float: "NUM", str: "TEXT", bool: "BOOL"}
_KEYS = "the key of another service is a variable that it reads, such as WANDB_API_KEY; "
_PLACEHOLDER = re.compile(r"\$?\$\{([^}]*)\}")


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

    ``none`` is None if the option may be None, and an empty list for another list; a text for a list is a JSON list or
    words split as a shell does; a text for a mapping is JSON, ``name=value`` pairs joined by commas, or the path of a
    YAML file.
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
        if [item.lower() for item in raw if isinstance(item, str)] == ["none"] and "none" not in wanted.choices:
            return None if wanted.optional else []
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
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = ((sign, getattr(limit, name, None)) for limit in field.metadata for name, sign in signs.items())
    return tuple(f"{sign} {value}" for sign, value in found if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlValue:
    """One option's value before conversion, and where its key stands (``file:line``). items: of a mapping the items
    alone that the file gives by their own keys (``option(prefix=…)``)."""

    raw: Raw
    where: str
    items: bool = False


def read_yaml(
    path: str, *, known: Mapping[str, FieldInfo], environ: Mapping[str, str]
) -> tuple[dict[str, YamlValue], list[ConfigError]]:
    """The options that the file sets, by option name, and what is wrong with other lines, each with ``file:line``: an
    unknown key (with the nearest known one), a key that comes twice, a placeholder that cannot be filled.

    Keys may be spelt with ``_`` or ``-``. Raises ConfigError with ``file:line`` for a file that is no flat mapping.
    """
    root = parse_yaml(path)
    if root is None:
        return {}, []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("the file is not a mapping", where=where_of(path, root), expected="lines of 'option: value'")
    values: dict[str, YamlValue] = {}
    errors: list[ConfigError] = []
    for key, node in root.value:
        where, name = where_of(path, key), str(key.value).replace("-", "_")
        fill = _filler(str(Path(path).absolute().parent), environ, where)
        owner, item = ("", "") if name in known else item_of_mapping(known, name)
        try:
            if owner:
                earlier = values.get(owner, YamlValue(raw={}, where=where, items=True))
                others = mapping_of(known[owner], earlier.raw, where)
                if item in others:
                    raise ConfigError(f"the option {key.value!r} is set twice", where=where)
                raw = {**others, item: _construct(node, fill, where)}
                values[owner] = YamlValue(raw=raw, where=where, items=earlier.items)
            elif name not in known:
                hint = did_you_mean(name, known) or "buffer-rl train --help lists the options"
                raise ConfigError(f"unknown option {key.value!r}", where=where, hint=_KEYS * is_secret(name) + hint)
            elif name in values:  # or items of it
                hint = f"see {values[name].where}"
                raise ConfigError(f"the option {key.value!r} is set twice", where=where, hint=hint)
            else:
                values[name] = YamlValue(raw=_raw(node, fill, where), where=where)
        except ConfigError as error:
            errors.append(error)
    return values, errors


def parse_yaml(path: str) -> yaml.Node | None:
    """The file as nodes that know their lines; None for an empty one. Raises ConfigError with ``file:line``."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        hint = f"the current folder is {Path.cwd()}" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the file: {error.strerror}", where=path, hint=hint) from error
    what, hint = not_text(content[:HEAD_BYTES], path)
    if what:
        raise ConfigError(f"this looks like {what}", where=path, expected="a YAML file", hint=hint)
    with raised_as(ConfigError, "the file is not UTF-8", UnicodeDecodeError, where=path):
        text = content.decode("utf-8-sig")
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line, hint = _mistake(text.split("\n"), error)
        what = f"invalid YAML: {error.problem or error.context}"
        raise ConfigError(what, where=f"{path}:{line}", hint=hint) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"invalid YAML: {error}", where=path) from error


_NO_BLANK = re.compile(r"\s*(\w+):([^\s/].*)")


def _mistake(lines: Sequence[str], error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """The line to look at, from 1, and what to do there; the parser often stops after the line that is wrong."""
    line = _line(error.problem_mark)
    before = (number for number in range(line - 1, 0, -1) if lines[number - 1].partition("#")[0].strip())
    for number in (line, next(before, line)):
        if found := _NO_BLANK.match("".join(lines[number - 1 : number])):
            return number, f"a blank follows the colon: '{found[1]}: {found[2].partition(' #')[0].rstrip()}'"
    problem = error.problem or ""
    if "\\t" in problem or "\t" in problem:
        return line, "indent with blanks, not with tabs"
    if "cannot start any token" in problem:
        return line, "put the value in quotes"
    if problem.startswith("mapping values"):
        return line, "put a value that has ': ' in it in quotes; lines of one mapping have the same indentation"
    return line, ""


def _raw(node: yaml.Node, fill: Callable[[str], str], where: str) -> Raw:
    """A scalar as its text (so that it reads as on the command line), a sequence of scalars as a list of texts."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == "tag:yaml.org,2002:null" else fill(node.value)
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ConfigError("a list holds something that is not a plain value", where=where)
        return [fill(item.value) for item in node.value]
    mapping: dict[Any, Any] = _construct(node, fill, where)
    return {str(key): value for key, value in mapping.items()}


def plain_value(path: str, node: yaml.Node, environ: Mapping[str, str]) -> Any:
    """A node as Python values, placeholders filled in. Raises ConfigError with ``file:line``."""
    where = where_of(path, node)
    return _construct(node, _filler(str(Path(path).absolute().parent), environ, where), where)


def _construct(node: yaml.Node, fill: Callable[[str], str], where: str) -> Any:
    with raised_as(ConfigError, "invalid YAML", yaml.YAMLError, where=where):
        value = yaml.SafeLoader("").construct_document(node)
    return _fill_deep(value, fill)


def _fill_deep(value: Any, fill: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return fill(value)
    if isinstance(value, list):
        return [_fill_deep(item, fill) for item in value]
    if isinstance(value, dict):
        return {key: _fill_deep(item, fill) for key, item in value.items()}
    return value


def _filler(here: str, environ: Mapping[str, str], where: str) -> Callable[[str], str]:
    """A function that fills placeholders: ``${here}`` is the file's folder, ``$${`` stands for a plain ``${``."""

    def replace(match: re.Match[str]) -> str:
        if match.group(0).startswith("$$"):
            return match.group(0)[1:]
        name = match.group(1)
        if name == "here":
            return here
        if not name.startswith("env:"):
            what, expected = f"unknown placeholder {match.group(0)}", "${here} (this file's folder) or ${env:NAME}"
            raise ConfigError(what, where=where, expected=expected, hint="write $${ for a plain ${")
        variable = name.removeprefix("env:")
        if variable not in environ:
            raise ConfigError(f"the environment variable {variable!r} is not set", where=where)
        return environ[variable]

    return lambda text: _PLACEHOLDER.sub(replace, text)


def where_of(path: str, node: yaml.Node) -> str:
    """``file:line`` of a node."""
    return f"{path}:{_line(node.start_mark)}"


def _line(mark: yaml.Mark | None) -> int:
    """The line as editors count it; YAML has further line ends, such as U+2028."""
    return mark.buffer.count("\n", 0, mark.pointer) + 1 if mark is not None and mark.buffer is not None else 1
