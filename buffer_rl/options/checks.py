"""Checks of options before a run starts, in short form: what ``Section.check`` of each section is written with.

Example:
    @staticmethod
    def check(args: Args) -> None:
        needs(args, "use_tis", "nothing is corrected", "custom_tis_function_path")
        refuse(args.min_lr > args.lr, "--lr and --min-lr: the learning rate would rise")
        refuse(given(args, "save", "load"), "--debug-rollout-only and {}: there is no trainer", "take {} out")
"""

from __future__ import annotations

from collections.abc import Mapping

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import Section, declared, flag_of, load_section
from buffer_rl.plugin.calls import call


def check_options(args: Args) -> None:
    """Every section's check, in the order of the sections. Raises ConfigError naming the flags that contradict each
    other or that a training run lacks. No plugin is imported, and no file is read but that of ``--eval-config``.

    args: the flat options of a training run, with every core section."""
    for reference in type(args).section_references:
        call("section", reference, _check, load_section(reference), args, at="check", error_class=ConfigError)


def _check(section: type[Section], args: Args) -> None:
    section.check(args)
    for name, field in section.model_fields.items():
        if (other := declared(field, "needs")) and "=" not in other:
            needs(args, other, f"nothing reads it without {flag_of(other)}", name)


def notices(args: Args) -> list[str]:
    """One text for each thing to know about options that ``check_options`` accepts; a run starts all the same."""
    found: list[str] = []
    for reference in type(args).section_references:
        section = load_section(reference)
        found += call("section", reference, lambda of: [*of.notices(args)], section, at="notices")
    return found


def refuse(found: object, what: str, hint: str = "", expected: str = "") -> None:
    """Raises ConfigError if ``found``.

    found: a condition; or text, such as a flag, which replaces each ``{}`` of the other texts. what: the flags, a colon
    and what is wrong with them. hint: what to do, if it is not to do what is expected, or to take the flags out."""
    if isinstance(found, str):
        what, hint, expected = (text.replace("{}", found) for text in (what, hint, expected))
    if found:
        where, _, what = what.partition(": ")
        hint = hint or ("" if expected else "take one of them out" if " and " in where else "take it out")
        raise ConfigError(what, where=where, expected=expected, hint=hint)


def needs(args: Args, other: str, what: str, *names: str, hint: str = "") -> None:
    """Raises ConfigError for options that only a run with the option ``other`` reads, if that is not given. hint: what
    to do, if it is neither to add ``other`` nor to take the option out."""
    if not getattr(args, other):
        field = type(args).model_fields[other]
        value = declared(field, "metavar") or ("" if field.annotation is bool else "N")
        hint = hint or f"{f'add {flag_of(other)} {value}'.rstrip()}, or take it out"
        refuse(given(args, *names), f"{{}}: {what}", hint)


def given(args: Args, *names: str) -> str:
    """The flag of the first of these options that has another value than its default; empty if all have theirs."""
    fields = type(args).model_fields
    defaults = {name: fields[name].get_default(call_default_factory=True) for name in names}
    return next((flag_of(name) for name in names if getattr(args, name) != defaults[name]), "")


def first(conditions: Mapping[str, object]) -> str:
    """The first name with a true value; empty if there is none."""
    return next((name for name, is_so in conditions.items() if is_so), "")
