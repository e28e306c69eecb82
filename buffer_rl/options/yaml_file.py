"""Options from a YAML file: one flat mapping, every key with its line, ``${here}`` and ``${env:NAME}`` filled in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from buffer_rl.errors import ConfigError
from buffer_rl.options.file_kind import HEAD_BYTES, not_text
from buffer_rl.options.section import did_you_mean, item_of_mapping
from buffer_rl.options.values import Raw, mapping_of

_PLACEHOLDER = re.compile(r"\$?\$\{([^}]*)\}")


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
        try:
            name, value = _option_of(path, key, node, values, known, environ)
            values[name] = value
        except ConfigError as error:
            errors.append(error)
    return values, errors


def _option_of(
    path: str,
    key: yaml.Node,
    node: yaml.Node,
    before: Mapping[str, YamlValue],
    known: Mapping[str, FieldInfo],
    environ: Mapping[str, str],
) -> tuple[str, YamlValue]:
    """The option of one key and its value, with the items of it that the file gave before. Raises ConfigError."""
    where = where_of(path, key)
    name = str(key.value).replace("-", "_")
    fill = _filler(str(Path(path).absolute().parent), environ, where)
    owner, item = ("", "") if name in known else item_of_mapping(known, name)
    if owner:
        earlier = before.get(owner, YamlValue(raw={}, where=where, items=True))
        others = mapping_of(known[owner], earlier.raw, where)
        if item in others:
            raise ConfigError(f"the option {key.value!r} is set twice", where=where)
        raw = {**others, item: _construct(node, fill, where)}
        return owner, YamlValue(raw=raw, where=where, items=earlier.items)
    if name not in known:
        hint = did_you_mean(name, known) or "buffer-rl train --help lists the options"
        raise ConfigError(f"unknown option {key.value!r}", where=where, hint=hint)
    if name in before:  # or items of it
        raise ConfigError(f"the option {key.value!r} is set twice", where=where, hint=f"see {before[name].where}")
    return name, YamlValue(raw=_raw(node, fill, where), where=where)


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
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file is not UTF-8: {error}", where=path) from error
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        where = f"{path}:{_line(error.problem_mark)}"
        raise ConfigError(f"invalid YAML: {error.problem or error.context}", where=where) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"invalid YAML: {error}", where=path) from error


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
    try:
        value = yaml.SafeLoader("").construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"invalid YAML: {error}", where=where) from error
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
            raise ConfigError(
                f"unknown placeholder {match.group(0)}",
                where=where,
                expected="${here} (this file's folder) or ${env:NAME}",
                hint="write $${ for a plain ${",
            )
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
