"""Options as argparse flags: one help group a section, both spellings, nearest names for what is unknown."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from buffer_rl.errors import ConfigError
from buffer_rl.options.section import Section, declared, did_you_mean, flag_of, item_of_mapping, load_section
from buffer_rl.options.values import OptionType, Raw, mapping_of, option_type

_DEST = "option "  # an option may have the name of a command's own flag, so its destination needs a prefix


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Flags on the left, sentences from a fixed column on."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=118)

    def add_argument(self, action: argparse.Action) -> None:
        """argparse forgets that verbs are indented, and breaks the line of the longest one."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of ending the process, and takes no abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with argparse's own words."""
        raise ConfigError(message.removeprefix("argument "), hint=f"see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse's check of choices, with the nearest one."""
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            name = "/".join(action.option_strings) or action.metavar or action.dest
            raise ConfigError(
                f"{name}: {value!r} is not known",
                expected=f"one of {', '.join(choices)}",
                hint=did_you_mean(str(value), choices),
            )


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``, a list of files, which may be empty."""
    text = "a YAML file of 'option: value' lines; given again, a later file wins over those before it"
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help=text)


def add_options(parser: argparse.ArgumentParser, sections: Sequence[str | type[Section]]) -> None:
    """Add a flag for each option, grouped by section. Values stay text; ``sources.resolve`` converts them."""
    for given in sections:
        section = load_section(given) if isinstance(given, str) else given
        group = parser.add_argument_group(section.heading or section.__name__)
        for name, field in section.model_fields.items():
            _add_option(group, name, field)


def _add_option(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    wanted = option_type(field)
    flag = flag_of(name)
    flags = [flag, *short_flag(field)]
    common: dict[str, Any] = {"dest": _DEST + name, "default": argparse.SUPPRESS, "help": help_text(field)}
    if wanted.base is bool and not wanted.many:
        group.add_argument(*flags, nargs="?", const="true", metavar="BOOL", **common)
        common["help"] = argparse.SUPPRESS
        group.add_argument(f"--no-{flag[2:]}", action="store_const", const="false", **common)
    elif wanted.many:
        group.add_argument(*flags, nargs="*", action="extend", metavar=metavar_of(field, wanted), **common)
    else:
        group.add_argument(*flags, metavar=metavar_of(field, wanted), **common)


def short_flag(field: FieldInfo) -> list[str]:
    """The option's one-letter flag, if it has one."""
    short = declared(field, "short")
    return [short] if short else []


def help_text(field: FieldInfo) -> str:
    """The option's sentence and its default, for argparse (which reads ``%`` as a format)."""
    return f"{field.description} (default: {default_text(field)})".replace("%", "%%")


def default_text(field: FieldInfo) -> str:
    """The default as one would write it on the command line; ``none`` for None and for an empty list."""
    default = field.get_default(call_default_factory=False)
    if default is None or default == []:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        return " ".join(str(item) for item in default)
    return str(default)


def metavar_of(field: FieldInfo, wanted: OptionType) -> str:
    """What stands for the value in the help text."""
    return declared(field, "metavar") or ("REF" if declared(field, "kind") else wanted.metavar)


def normalise_flags(argv: Sequence[str]) -> list[str]:
    """The arguments with ``-`` for every ``_`` in flag names; values are left alone."""
    normal = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token.partition("=")
            name = name.replace("_", "-")
            if " " in value and not value.startswith("-"):
                normal += [name, value]  # argparse takes a token with a space for a value
                continue
            token = name + equals + value
        normal.append(token)
    return normal


def given_flags(namespace: argparse.Namespace) -> dict[str, Raw]:
    """The options that were given as flags, by option name."""
    return {key.removeprefix(_DEST): value for key, value in vars(namespace).items() if key.startswith(_DEST)}


def set_flag(namespace: argparse.Namespace, name: str, value: Raw) -> None:
    """Have the option ``name`` as if its flag had been given with ``value``."""
    setattr(namespace, _DEST + name, value)


def take_items(namespace: argparse.Namespace, extra: Sequence[str]) -> list[str]:
    """Move the items of mappings (``option(prefix=…)``) from the arguments ``extra``, which no flag took, to their
    options: a flag without value is True, one with several is a list. Returns the other arguments."""
    sections = [load_section(each) if isinstance(each, str) else each for each in getattr(namespace, "sections", ())]
    known = {name: field for section in sections for name, field in section.model_fields.items()}
    items: dict[str, dict[str, list[str]]] = {}
    own: dict[str, list[str]] = {}
    rest: list[str] = []
    values = rest
    for token in extra:
        flag, equals, value = token.partition("=")
        name = flag[2:].replace("-", "_") if token.startswith("--") else ""
        owner, item = item_of_mapping(known, name)
        if owner and name in known:  # no item, but an option beside them, of which this command has no flag
            values = own.setdefault(name, [])
            values += [value] if equals else []
        elif owner:
            if item in items.get(owner, {}):
                raise ConfigError(f"{flag} is given twice")
            values = items.setdefault(owner, {}).setdefault(item, [])
            values += [value] if equals else []
        elif token.startswith("--"):
            values = rest
            rest.append(token)
        else:
            values.append(token)
    for name, given_values in own.items():
        set_flag(namespace, name, given_values[0] if len(given_values) == 1 else given_values)
    for owner, found in items.items():
        given = mapping_of(known[owner], given_flags(namespace).get(owner, {}), flag_of(owner))
        texts = {item: values[0] if len(values) == 1 else values or True for item, values in found.items()}
        set_flag(namespace, owner, {**given, **texts})
    return rest


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """All flags of a parser and of its sub-commands."""
    flags: list[str] = []
    for action in parser._actions:
        flags.extend(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                flags.extend(flags_of(child))
    return flags
