"""Options as argparse flags: both spellings, a help page of the most used ones, and one for each section."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
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
            what = f"{name}: {value!r} is not known"
            raise ConfigError(what, expected=f"one of {', '.join(choices)}", hint=did_you_mean(str(value), choices))


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``, a list of files, which may be empty."""
    text = "a YAML file of 'option: value' lines; given again, a later file wins"
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help=text)


def add_options(parser: argparse.ArgumentParser, sections: Sequence[str | type[Section]]) -> None:
    """Add a flag for each option, grouped by section. Values stay text; ``sources.resolve`` converts them."""
    for section in map(load_section, sections):
        group = parser.add_argument_group(section.heading or section.__name__)
        for name, field in section.model_fields.items():
            add_option(group, name, field)


def add_help(parser: argparse.ArgumentParser, sections: Sequence[str | type[Section]]) -> None:
    """Add ``--help [SECTION]`` to a parser without it, which gets the options of these sections."""
    parser.add_argument("-h", "--help", action=_Help, sections=sections)


def keep_in_help(parser: argparse.ArgumentParser, acts: Callable[[str, str], bool]) -> None:
    """Leave out of the help pages what does nothing for this command: every option for which ``acts``, called with
    the heading of its section and its name, is false. Its flag stays, and its name is in ``idle``, a default."""
    idle = set()
    for group in parser._action_groups:
        for action in group._group_actions:
            name = action.dest.removeprefix(_DEST)
            if name != action.dest and not acts(group.title or "", name):
                action.help = argparse.SUPPRESS
                idle.add(name)
    parser.set_defaults(idle=idle)


def reword_help(parser: argparse.ArgumentParser, texts: Mapping[str, str]) -> None:
    """Say in the help pages what some options, by name, mean to this command; the default of another meaning is left
    out."""
    for action in parser._actions:
        name = action.dest.removeprefix(_DEST)
        if name != action.dest and name in texts and action.help != argparse.SUPPRESS:
            action.help = texts[name].replace("%", "%%")


class _Help(argparse.Action):
    """Prints the most used options and the names of all sections; one section or one option by its name; or all."""

    def __init__(self, *, sections: Sequence[str | type[Section]], **kwargs: Any) -> None:
        text = "show the most used options; all options of SECTION; or every option (all)"
        kwargs |= {"dest": argparse.SUPPRESS, "nargs": "?", "metavar": "SECTION", "help": text}
        super().__init__(default=argparse.SUPPRESS, **kwargs)
        self._sections = sections

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: object, flag: object = None) -> None:
        print(_help_page(parser, [*map(load_section, self._sections)], _slug(str(values or ""))), end="")
        parser.exit()


def _slug(heading: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def _help_page(parser: argparse.ArgumentParser, sections: Sequence[type[Section]], asked: str) -> str:
    """asked: empty for the most used options, ``all``, or a section's or an option's name. Raises ConfigError."""
    titled = {section.heading or section.__name__: section for section in sections}
    flags: dict[str, list[argparse.Action]] = {}
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        flags.setdefault(group.title or "", []).extend(shown)
    slugs = {_slug(title): title for title in titled if flags[title]}
    common = {name for section in sections for name, field in section.model_fields.items() if declared(field, "common")}

    def asked_for(title: str, action: argparse.Action) -> bool:
        name = action.dest.removeprefix(_DEST)
        if asked in ("", "all"):
            return bool(asked) or title not in titled or name in common
        return title in titled and asked in (_slug(title), _slug(name))

    chosen = {title: [each for each in actions if asked_for(title, each)] for title, actions in flags.items()}
    if not any(chosen.values()):
        expected = f"one of {', '.join(slugs)}, all, or the name of an option"
        hint = did_you_mean(asked, [*slugs, *(_slug(name) for section in sections for name in section.model_fields)])
        raise ConfigError(f"there is no section of options {asked!r}", expected=expected, hint=hint)
    formatter = parser._get_formatter()
    if asked in ("", "all"):
        formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
        formatter.add_text(parser.description)
    for title, actions in chosen.items():
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    if not asked:
        core = {slug: title for slug, title in slugs.items() if titled[title].__module__.startswith("buffer_rl.")}
        lines = [_section_line(slug, len(flags[title]), titled[title]) for slug, title in core.items()]
        of_plugins = (f"{slug} {len(flags[title])}" for slug, title in slugs.items() if slug not in core)
        text = f"of plugins: {', '.join(of_plugins)}"
        lines += textwrap.wrap(text, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        more = f"all options by section: {parser.prog} --help SECTION, or {parser.prog} --help all"
        formatter.add_text("\n".join([more, *lines]).replace("%", "%%"))
    return formatter.format_help()


def _section_line(slug: str, count: int, section: type[Section]) -> str:
    about = re.split(r"\.\s|\n", f"{section.__doc__ or ''}\n")[0].rstrip(".")
    return f"  {slug:<17} {count:>3}  {about}"


def add_option(group: argparse._ActionsContainer, name: str, field: FieldInfo) -> None:
    """Add the flag of one option."""
    wanted, flag = option_type(field), flag_of(name)
    flags = [flag, *short_flag(field)]
    text = f"{field.description} (default: {default_text(field)})".replace("%", "%%")  # argparse reads it as a format
    common: dict[str, Any] = {"dest": _DEST + name, "default": argparse.SUPPRESS, "help": text}
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
    sections = map(load_section, getattr(namespace, "sections", ()))
    known = {name: field for section in sections for name, field in section.model_fields.items()}
    items: dict[str, dict[str, list[str]]] = {}
    own: dict[str, list[str]] = {}
    rest: list[str] = []
    for flag, tokens, values in by_flag(extra):
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        owner, item = item_of_mapping(known, name)
        if not owner:
            rest += tokens
        elif name in known:  # no item, but an option beside them, of which this command has no flag
            own.setdefault(name, []).extend(values)
        elif item in items.get(owner, {}):
            raise ConfigError(f"{flag} is given twice")
        else:
            items.setdefault(owner, {})[item] = values
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


def by_flag(extra: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    """Each flag with its tokens and its values; what comes before the first flag is one without a name."""
    groups: list[tuple[str, list[str], list[str]]] = []
    for token in extra:
        if token.startswith("--") or (token.startswith("-") and not _is_number(token)):
            flag, equals, value = token.partition("=")
            groups.append((flag, [token], [value] if equals else []))
            continue
        if not groups:
            groups.append(("", [], []))
        for tokens in groups[-1][1:]:
            tokens.append(token)
    return groups


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True
