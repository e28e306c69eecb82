"""One set of options from a file, the environment and flags: file < environment < flags, each value with its origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from buffer_rl.config import ENV_PREFIX, Options, did_you_mean, env_of, flag_of
from buffer_rl.configuration.values import Raw, convert, mapping_of, option_type
from buffer_rl.configuration.yaml_file import read_yaml
from buffer_rl.errors import ConfigError
from buffer_rl.redaction import MASK, holds_credentials, is_secret, mask_secrets, mask_url

# Variables of the program itself, which are no options.
RESERVED_VARIABLES = ("BUFFER_RL_TRACEBACK", "BUFFER_RL_DISABLE_PLUGIN_AUTOLOAD")


class Source(StrEnum):
    """Where a value comes from, from the weakest to the strongest."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where one option's value comes from; ``where`` is ``file:line``, the variable or the flag."""

    source: Source
    where: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.where}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Options and the origin of each, by name, in the order of the sections."""

    args: Options
    origins: Mapping[str, Origin]


def resolve(
    options_class: type[Options], *, flags: Mapping[str, Raw], environ: Mapping[str, str], config_path: str | None
) -> Resolved:
    """Merge the sources and validate. Raises ConfigError naming option, value, expected type and origin, and for a
    secret among the flags, be it an option or a part of an address."""
    known = options_class.model_fields
    raws: dict[str, Raw] = {}
    origins = {name: Origin(source=Source.DEFAULT) for name in known}
    if config_path is not None:
        for name, value in read_yaml(config_path, known=known, environ=environ).items():
            raws[name] = _one_item(value.raw) if option_type(known[name]).many else value.raw
            origins[name] = Origin(source=Source.FILE, where=value.where)
    for name, text in read_environ(environ, known=list(known)).items():
        raws[name] = text
        origins[name] = Origin(source=Source.ENVIRONMENT, where=env_of(name))
    for name, raw in flags.items():
        _refuse_secret(name, raw)
        if isinstance(raw, dict):  # items, which are added to what file and environment say
            raw = {**mapping_of(known[name], raws.get(name, {}), str(origins[name])), **raw}
        raws[name] = raw
        origins[name] = Origin(source=Source.FLAG, where=flag_of(name))
    values = {name: convert(option_type(known[name]), raw) for name, raw in raws.items()}
    for name in flags:
        for key, value in values[name].items() if isinstance(values[name], Mapping) else ():
            _refuse_secret(name, str(value), key)
    try:
        args = options_class.model_validate(values)
    except ValidationError as error:
        raise _explain(options_class, raws, origins, error) from error
    return Resolved(args=args, origins=origins)


def _refuse_secret(name: str, raw: Raw, key: str = "") -> None:
    """A flag's value is in the process list, which every user of the machine can read. ``key``: of a value in it."""
    elsewhere = f"the variable {env_of(name)}, or a line in the --config file"
    if is_secret(key or name) and raw and str(raw).lower() != "none":
        raise ConfigError(
            "a secret on a command line can be read by every user of the machine",
            where=f"{flag_of(name)} {key}".rstrip(),
            expected=elsewhere,
        )
    addresses = [text for text in (raw if isinstance(raw, list) else [raw]) if isinstance(text, str)]
    if found := next((text for text in addresses if holds_credentials(text)), None):
        raise ConfigError(
            f"the address {mask_url(found)} has credentials in it, which every user of the machine can read on a "
            "command line",
            where=flag_of(name),
            expected=elsewhere,
        )


def read_environ(environ: Mapping[str, str], *, known: Sequence[str]) -> dict[str, str]:
    """The options set as ``BUFFER_RL_<NAME>``. Raises ConfigError for an unknown name with that prefix."""
    names = {env_of(name): name for name in known}
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in RESERVED_VARIABLES:
            continue
        if variable not in names:
            raise ConfigError(
                "this environment variable names no option",
                where=variable,
                hint=did_you_mean(variable, [*names, *RESERVED_VARIABLES]),
            )
        found[names[variable]] = text
    return found


def _one_item(raw: Raw) -> Raw:
    """A scalar in a file is the only item of a list: a path may hold spaces. Text in brackets is JSON."""
    return [raw] if isinstance(raw, str) and not raw.lstrip().startswith("[") else raw


def _explain(
    options_class: type[Options], raws: Mapping[str, Raw], origins: Mapping[str, Origin], error: ValidationError
) -> ConfigError:
    """One error for all wrong values: one line an option."""
    lines = {}
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if name not in lines:
            lines[name] = _explain_one(options_class, raws, origins, name, detail)
    return ConfigError("\n".join(lines.values()))


def _explain_one(
    options_class: type[Options],
    raws: Mapping[str, Raw],
    origins: Mapping[str, Origin],
    name: str,
    detail: ErrorDetails,
) -> str:
    if name not in options_class.model_fields:
        return mask_url(detail["msg"])
    wanted = option_type(options_class.model_fields[name])
    given: Any = raws.get(name, detail["input"])
    shown: Any = MASK if is_secret(name) else mask_secrets(given)
    line = f"{flag_of(name)}: {shown!r} is not {_article(str(wanted))} ({origins[name]})"
    if isinstance(shown, str) and wanted.choices and not is_secret(name):
        hint = did_you_mean(shown, [str(choice) for choice in wanted.choices])
        line += f"; {hint}" if hint else ""
    if detail["type"] in ("value_error", "assertion_error"):
        line += "" if is_secret(name) else f": {mask_url(detail['msg'])}"
    return line


def _article(words: str) -> str:
    if words.startswith(("one of", "text", "true")):
        return words
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"
