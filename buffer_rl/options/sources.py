"""One set of options from files, the environment and flags: file < later file < environment < flags, each value with
its origin.

Flags that no option takes are those that a plugin knows from another program's scripts, or mistakes, which are reported
all at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError, all_of
from buffer_rl.options.help import by_flag, given_flags, set_flag
from buffer_rl.options.redaction import MASK, holds_credentials, is_secret, mask_secrets, mask_url
from buffer_rl.options.section import (
    ENV_PREFIX,
    compose,
    declared,
    did_you_mean,
    env_of,
    flag_of,
    item_of_mapping,
    load_section,
)
from buffer_rl.options.values import Raw, convert, mapping_of, option_type, read_yaml
from buffer_rl.plugin.calls import returned
from buffer_rl.plugin.hookspecs import FlagMeaning
from buffer_rl.plugin.old_names import with_new_names
from buffer_rl.plugin.registry import PluginRegistry

# Variables of the program itself, which are no options.
RESERVED_VARIABLES = ("BUFFER_RL_TRACEBACK", "BUFFER_RL_DISABLE_PLUGIN_AUTOLOAD", "BUFFER_RL_FORK_SERVER")


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
    """Options and the origin of each, by name, in the order of the sections. notices: what the user should know."""

    args: Args
    origins: Mapping[str, Origin]
    notices: Sequence[str] = ()


def resolve(
    options_class: type[Args], *, flags: Mapping[str, Raw], environ: Mapping[str, str], config_paths: Sequence[str] = ()
) -> Resolved:
    """Merge the sources and validate. Of several files a later one wins, option by option.

    Of options that exclude each other (``option(one_of=…)``) the one from the strongest source counts, with a notice;
    so it is with an option and what it turns off (``option(needs=…)``).

    Raises ConfigError with all mistakes of files, variables and values: option, value, expected type and origin; and
    for a secret among the flags, be it an option or a part of an address."""
    known = options_class.model_fields
    raws: dict[str, Raw] = {}
    origins = {name: Origin(source=Source.DEFAULT) for name in known}
    ranks: dict[str, int] = {}
    errors: list[ConfigError] = []

    def take(name: str, raw: Raw, origin: Origin, rank: int, *, items: bool = False) -> None:
        if items and isinstance(raw, dict):  # which are added to what weaker sources say
            raw = {**mapping_of(known[name], raws.get(name, {}), str(origins[name])), **raw}
        raws[name], origins[name], ranks[name] = raw, origin, rank

    for rank, path in enumerate(config_paths):
        try:
            values, wrong = read_yaml(os.path.expanduser(path), known=known, environ=environ)
        except ConfigError as error:
            values, wrong = {}, [error]
        errors += wrong
        for name, value in values.items():
            raw = _one_item(value.raw) if option_type(known[name]).many else value.raw
            take(name, raw, Origin(source=Source.FILE, where=value.where), rank, items=value.items)
    texts, wrong = read_environ(environ, known=list(known))
    errors += wrong
    for name, text in texts.items():
        take(name, text, Origin(source=Source.ENVIRONMENT, where=env_of(name)), len(config_paths))
    for name, raw in flags.items():
        _refuse_secret(name, raw)
        take(name, raw, Origin(source=Source.FLAG, where=flag_of(name)), len(config_paths) + 1, items=True)
    converted = {name: _converted(known[name], raw) for name, raw in raws.items()}
    for name in flags:
        for key, value in converted[name].items() if isinstance(converted[name], Mapping) else ():
            _refuse_secret(name, str(value), key)
    notices, wrong = _keep_one_of_each_group(known, converted, origins, ranks)
    notices += _drop_unread(known, converted, origins, ranks)
    notices += _take_new_names(known, converted, origins)
    try:
        args = options_class.model_validate(converted)
    except ValidationError as error:
        wrong += _explain(options_class, raws, origins, error)
    if errors + wrong:
        raise all_of(errors + wrong)
    return Resolved(args=args, origins=origins, notices=notices)


def resolve_namespace(namespace: argparse.Namespace) -> Resolved:
    """The options of a command line: ``resolve`` for its ``sections``, flags and files. Raises ConfigError."""
    flags, options_class = given_flags(namespace), compose(namespace.sections)
    return resolve(options_class, flags=flags, environ=os.environ, config_paths=namespace.config)


def _converted(field: FieldInfo, raw: Raw) -> Any:
    value = convert(option_type(field), raw)
    if declared(field, "metavar") not in ("PATH", "FILE"):
        return value
    if isinstance(value, list):
        return [os.path.expanduser(item) if isinstance(item, str) else item for item in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def _take_new_names(known: Mapping[str, FieldInfo], values: dict[str, Any], origins: Mapping[str, Origin]) -> list[str]:
    """Replace plugin references of earlier versions. Returns a notice for each option that has some."""
    notices = []
    for name in values:
        if declared(known[name], "kind") and (new := with_new_names(values[name])) != values[name]:
            notices.append(f"{flag_of(name)} {values[name]} ({origins[name]}) is {new} now")
            values[name] = new
    return notices


def _keep_one_of_each_group(
    known: Mapping[str, FieldInfo], values: dict[str, Any], origins: dict[str, Origin], ranks: Mapping[str, int]
) -> tuple[list[str], list[ConfigError]]:
    """Take out of ``values`` what a stronger source replaces by another option of its group (``option(one_of=…)``).

    Returns a notice for each, and an error for options of a group from one source. An option that is none, or an empty
    list, is not given.
    """
    groups: dict[str, list[str]] = {}
    for name, field in known.items():
        if (group := declared(field, "one_of")) and values.get(name) not in (None, []):
            groups.setdefault(group, []).append(name)

    def described(name: str) -> str:
        return f"{flag_of(name)} {mask_secrets(values[name], name)} ({origins[name]})"

    notices, errors = [], []
    for given in groups.values():
        strongest = max(ranks[name] for name in given)
        kept = [name for name in given if ranks[name] == strongest]
        rivals = [name for name in kept if known[name].default or str(values[name]) != str(known[name].default)]
        if len(rivals) > 1:
            what = f"these options exclude each other: {' and '.join(map(described, rivals))}"
            errors.append(ConfigError(what, hint="keep one of them"))
        for name in [name for name in given if name not in kept]:
            notices.append(f"{described((rivals or kept)[0])} replaces {described(name)}")
            del values[name]
            origins[name] = Origin(source=Source.DEFAULT)
    return notices, errors


def _drop_unread(
    known: Mapping[str, FieldInfo], values: dict[str, Any], origins: dict[str, Origin], ranks: dict[str, int]
) -> list[str]:
    """Take out of ``values`` what needs another option (``option(needs=…)``) that a stronger source turns off, or sets
    to another value. Returns a notice for each of these."""
    left_out: dict[str, list[str]] = {}
    for name, field in known.items():
        other, _, wanted = declared(field, "needs").partition("=")
        if name not in values or ranks.get(other, -1) <= ranks[name]:
            continue
        given = str(values.get(other)).lower()
        if given != wanted if wanted else given in ("none", "false", "0", "[]"):
            cause = f"{flag_of(other)} {given} ({origins[other]})" if other in values else f"no {flag_of(other)}"
            left_out.setdefault(cause, []).append(f"{flag_of(name)} ({origins[name]})")
            del values[name]
            origins[name], ranks[name] = Origin(source=Source.DEFAULT), ranks[other]
    return [f"{cause} leaves out {', '.join(names)}" for cause, names in left_out.items()]


def _refuse_secret(name: str, raw: Raw, key: str = "") -> None:
    """A flag's value is in the process list, which every user of the machine can read. ``key``: of a value in it."""
    elsewhere = f"the variable {env_of(name)}, or a line in the --config file"
    if is_secret(key or name) and raw and str(raw).lower() != "none":
        what = "a secret on a command line can be read by every user of the machine"
        raise ConfigError(what, where=f"{flag_of(name)} {key}".rstrip(), expected=elsewhere)
    addresses = [text for text in (raw if isinstance(raw, list) else [raw]) if isinstance(text, str)]
    if found := next((text for text in addresses if holds_credentials(text)), None):
        readers = "which every user of the machine can read on a command line"
        what = f"the address {mask_url(found)} has credentials in it, {readers}"
        raise ConfigError(what, where=flag_of(name), expected=elsewhere)


def read_environ(environ: Mapping[str, str], *, known: Sequence[str]) -> tuple[dict[str, str], list[ConfigError]]:
    """The options set as ``BUFFER_RL_<NAME>``, and an error for each unknown name with that prefix."""
    names = {env_of(name): name for name in known}
    mine = [name for name in environ if name.startswith(ENV_PREFIX) and name not in RESERVED_VARIABLES]
    what, known_names = "this environment variable names no option", [*names, *RESERVED_VARIABLES]
    unknown = [variable for variable in mine if variable not in names]
    errors = [ConfigError(what, where=each, hint=did_you_mean(each, known_names)) for each in unknown]
    return {names[variable]: environ[variable] for variable in mine if variable in names}, errors


def _one_item(raw: Raw) -> Raw:
    """A scalar in a file is the only item of a list: a path may hold spaces. Text in brackets is JSON."""
    return [raw] if isinstance(raw, str) and not raw.lstrip().startswith("[") else raw


def _explain(
    options_class: type[Args], raws: Mapping[str, Raw], origins: Mapping[str, Origin], error: ValidationError
) -> list[ConfigError]:
    """One error for each option with a wrong value."""
    lines: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if name not in options_class.model_fields:
            lines.setdefault(name, mask_url(detail["msg"]))
        if name in lines:
            continue
        wanted = option_type(options_class.model_fields[name])
        given: Any = raws.get(name, detail["input"])
        shown: Any = MASK if is_secret(name) else mask_secrets(given)
        line = f"{flag_of(name)}: {shown!r} is not {_article(str(wanted))} ({origins[name]})"
        if isinstance(shown, str) and wanted.choices and not is_secret(name):
            hint = did_you_mean(shown, [str(choice) for choice in wanted.choices])
            line += f"; {hint}" if hint else ""
        if detail["type"] in ("value_error", "assertion_error"):
            line += "" if is_secret(name) else f": {mask_url(detail['msg'])}"
        lines[name] = line
    return [ConfigError(line) for line in lines.values()]


def _article(words: str) -> str:
    if words.startswith(("one of", "text", "true")):
        return words
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def take_unknown(namespace: argparse.Namespace, extra: Sequence[str], flags: Sequence[str], *, prog: str) -> list[str]:
    """Take those flags among the arguments ``extra`` that, as a plugin says, may be left out or stand for options,
    which are set. Returns a notice for each reason. flags: those of the command ``prog``.

    Raises ConfigError for a flag that says something else than the option that it stands for, and for all others
    together."""
    if not extra:
        return []
    plugins = list(given_flags(namespace).get("plugin") or ())
    registry = PluginRegistry.from_flags(plugins)
    rest, notices, ignored = list[str](), list[str](), dict[str, list[str]]()
    has_options = hasattr(namespace, "sections")  # only commands with options take flags of others
    for flag, tokens, values in by_flag(extra):
        known = explain(registry, flag[2:], values) if has_options and flag.startswith("--") else None
        if known is None or not known.accepted:
            rest += tokens
            continue
        for option, value in known.options:
            if flag_of(option) not in flags:
                raise ConfigError(f"a plugin takes it for {option!r}, which is no option", where=flag)
            if given_flags(namespace).get(option, value) != value:
                raise ConfigError(f"both are given, and differ: {known.reason}", where=f"{flag} and {flag_of(option)}")
            set_flag(namespace, option, value)
        if known.options:
            notices.append(f"{flag}: {known.reason}")
        else:
            ignored.setdefault(known.reason, []).append(flag)
    _refuse_unknown(rest, flags, registry, plugins, prog=prog)
    return notices + [f"ignored, as {why}: {' '.join(same)}" for why, same in ignored.items()]


def explain(registry: PluginRegistry, name: str, values: Sequence[str]) -> FlagMeaning | None:
    """What a flag means to the first plugin that knows it, by its name without dashes and its values. Raises
    PluginError for an answer that is none."""
    hook = "buffer_rl_explain_flag"
    for plugin, meaning in registry.call_hook(hook, name=name, values=values):
        if not isinstance(meaning, FlagMeaning):
            raise returned("plugin", plugin, meaning, "FlagMeaning or None", at=hook)
        return meaning
    return None


def _blocked_owner(flag: str, plugins: Sequence[str]) -> str:
    """What is known of a flag that is an option of a plugin blocked by ``-p no:NAME`` among ``plugins``."""
    wanted = [each for each in plugins if not each.startswith("no:")]
    if len(wanted) == len(plugins):
        return ""
    name = flag.lstrip("-").replace("-", "_")
    for plugin, sections in PluginRegistry.from_flags(wanted).call_hook("buffer_rl_add_options"):
        for section in sections if isinstance(sections, list | tuple) else ():
            fields = load_section(section).model_fields
            if name in fields or item_of_mapping(fields, name)[0]:
                return f"an option of the plugin {plugin}, which -p no:... blocks"
    return ""


def _refuse_unknown(
    extra: Sequence[str], flags: Sequence[str], registry: PluginRegistry, plugins: Sequence[str], *, prog: str
) -> None:
    """Raises ConfigError naming every argument that no flag took, with what is known of it or the nearest of
    ``flags``."""
    if not extra:
        return
    groups = by_flag(extra)
    unknown = [group for group in groups if group[0].startswith("-")]
    if not unknown:
        is_file = "--config" in flags and extra[0].endswith((".yaml", ".yml"))
        name, equals, _ = extra[0].partition("=")
        near = did_you_mean(name, flags) if equals and name.replace(".", "").isidentifier() else ""
        hint = f"did you mean --config {extra[0]}?" if is_file else near or f"see {prog} --help"
        raise ConfigError(f"unexpected argument {extra[0]!r}", hint=hint)
    known = {flag: explain(registry, flag.lstrip("-"), values) for flag, _, values in unknown}
    lines = {
        flag: f"{meaning.kind}: {meaning.reason}"
        if meaning
        else _blocked_owner(flag, plugins) or did_you_mean(flag, flags)
        for flag, meaning in known.items()
    }
    page = next((meaning.page for meaning in known.values() if meaning), "")
    if len(lines) == 1:
        flag, why = next(iter(lines.items()))
        if known[flag]:
            raise ConfigError(f"unknown flag {flag}: {why}", hint=page)
        raise ConfigError(f"unknown flag {flag}", hint=why or f"see {prog} --help")
    text = "\n".join(f"  {flag}: {why}" if why else f"  {flag}" for flag, why in lines.items())
    raise ConfigError(f"{len(lines)} unknown flags\n{text}", hint=page or f"see {prog} --help")
