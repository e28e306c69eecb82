"""Options: typed, flat, frozen; flags, environment and YAML come from the same definitions.

A section is a frozen pydantic model that stands beside its owner (``buffer_rl/rollout/options.py`` …); ``compose``
makes one flat class of all of them. ``args`` everywhere is an instance of that class, so a component's
signature can ask for its own section. Across processes options travel as JSON plus the references of their
sections (``dump_args``, ``load_args``), because a class composed at run time cannot be pickled by name.

Reading them from flags, environment and files is in ``buffer_rl.options``.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import types
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, ClassVar, Self, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, create_model, field_validator
from pydantic.fields import FieldInfo

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError, raised_as
from buffer_rl.options.user_args import UserArgs
from buffer_rl.plugin.calls import contained, error_name

T = TypeVar("T")
ENV_PREFIX = "BUFFER_RL_"


class Section(BaseModel):
    """Base of all option sections. ``heading`` is the group that ``--help`` shows the options under."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
    heading: ClassVar[str] = ""

    @field_validator("*", mode="before")
    @classmethod
    def _one_text_is_a_list_of_one(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        return [value] if isinstance(value, str) and field is not None and _is_list(field.annotation) else value

    @staticmethod
    def check(args: Args) -> None:
        """Raises ConfigError for options of this section that contradict each other or others of the run. Nothing has
        started, and no plugin is imported (``buffer_rl.options.checks`` has short forms)."""

    @staticmethod
    def notices(args: Args) -> Iterable[str]:
        """One text for each thing to know about these options, which ``check`` accepts."""
        return ()


class Options(Section):
    """Base of the classes that ``compose`` makes: ``args`` is an ``Options`` and each of its sections.

    section_references: ``module:Class`` of every section, from which another process builds the same class.
    """

    section_references: ClassVar[tuple[str, ...]] = ()

    @functools.cached_property
    def for_user_code(self) -> UserArgs:
        """What the user's functions in this process receive as ``args``."""
        names = type(self).model_fields
        values = {name: getattr(self, name) for name in names}
        return UserArgs(values, [name for name in names if plugin_kind_of(type(self), name)])

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied.__dict__.pop("for_user_code", None)  # of the options before what is changed in the copy
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return load_args, (dump_args(self),)


def _is_list(annotation: Any) -> bool:
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return any(get_origin(member) is list for member in members)


def option(
    default: Any,
    help: str,
    *,
    kind: str = "",
    metavar: str = "",
    short: str = "",
    prefix: str = "",
    one_of: str = "",
    needs: str = "",
    common: bool = False,
    **constraints: Any,
) -> Any:
    """One option of a section.

    help: one sentence, with the unit where there is one. ``kind``: the option's value is a plugin reference (or a
    list of them) of this plugin kind, checked before anything starts. ``short``: a second flag of one letter, for
    example ``-p``. ``metavar``: what ``--help`` shows as the value; of ``PATH`` and ``FILE`` a leading ``~`` is the
    home folder. ``prefix``: of a mapping whose items are options too: with ``tool_``, ``--tool-level 3`` is its
    item ``level``, unless another option has that name. ``one_of``: the name of a group of options of which a run has
    one: a flag replaces what a file says for another of the group. ``needs``: the name of the option without which
    nothing reads this one; it is then refused, and left out if a stronger source turns the other off. With
    ``name=value`` it is left out if a stronger source sets another value. ``common``: a first run needs it, so the
    short ``--help`` shows it.
    ``constraints`` go to ``pydantic.Field``.
    """
    needed = flag_of(needs).replace("=", " ")
    note = f"; needs {needed}" if needs and needed not in help else ""
    extra = {"kind": kind, "metavar": metavar, "short": short, "prefix": prefix, "one_of": one_of, "needs": needs}
    extra["common"] = "yes" if common else ""
    return Field(default, description=help + note, json_schema_extra={**extra}, **constraints)


def compose(sections: Sequence[str | type[Section]]) -> type[Args]:
    """One flat frozen class that derives from every section; equal sections give the same class.

    sections: classes, or their references ``module:Class``. Raises ConfigError for a reference that does not
    resolve and for a name that two sections declare (naming both).
    """
    return cast("type[Args]", _compose(tuple(map(load_section, sections))))


@functools.cache
def _compose(sections: tuple[type[Section], ...]) -> type[Options]:
    owners: dict[str, type[Section]] = {}
    for section in sections:
        for name in section.model_fields:
            if name in owners:
                where = f"{section_reference(owners[name])} and {section_reference(section)}"
                hint = "rename one of them; a plugin's options carry the plugin's name as a prefix"
                raise ConfigError(f"the option {name!r} is declared twice", where=where, hint=hint)
            owners[name] = section
    # pydantic collects fields from the last base to the first; reversed, they keep the order of the sections.
    make: Any = create_model  # typed for one base; there are several here
    made = make("Options", __base__=(*reversed(sections), Options))
    made.section_references = tuple(section_reference(section) for section in sections)
    return cast("type[Options]", made)


def section_reference(section: type[Section]) -> str:
    """``module:Class`` of a section."""
    return f"{section.__module__}:{section.__qualname__}"


def load_section(reference: str | type[Section]) -> type[Section]:
    """The section class that ``module:Class`` names, or the given one. Raises ConfigError if there is none."""
    if not isinstance(reference, str):
        return reference
    module_name, _, class_name = reference.partition(":")
    try:
        with contained():
            found: Any = importlib.import_module(module_name)
            for part in class_name.split("."):
                found = getattr(found, part)
    except Exception as error:  # fault boundary: the module of a plugin
        what = f"there is no option section {reference!r}: {error_name(error)}"
        raise ConfigError(what, expected="module:Class") from error
    if not (isinstance(found, type) and issubclass(found, Section)):
        raise ConfigError(f"{reference!r} is not a subclass of buffer_rl.options.section.Section")
    return found


def dump_args(args: Options) -> str:
    """Options as JSON text, with the references of their sections. The inverse of ``load_args``.

    Raises ConfigError for a section that another process could not import."""
    for reference in args.section_references:
        if "<locals>" in reference:
            what = f"the section {reference!r} is defined inside a function and cannot be sent to another process"
            raise ConfigError(what)
    return json.dumps({"sections": args.section_references, "options": args.model_dump(mode="json")})


def load_args(text: str) -> Args:
    """Options from the text of ``dump_args``: the same class and the same values. Raises ConfigError."""
    unreadable = (json.JSONDecodeError, KeyError, TypeError)
    with raised_as(ConfigError, "these are no options written by dump_args", unreadable):
        stored = json.loads(text)
        references, values = stored["sections"], stored["options"]
    with raised_as(ConfigError, "these options do not fit their sections", ValidationError):
        return compose(references).model_validate(values)


def required(value: T | None, name: str) -> T:
    """The value of the option ``name``, which may be left out and must not be here. Raises ConfigError if it is."""
    if value is None:
        raise ConfigError("the option is not given", where=flag_of(name))
    return value


def flag_of(name: str) -> str:
    """The flag of an option, for example ``--rollout-batch-size``."""
    return "--" + name.replace("_", "-")


def env_of(name: str) -> str:
    """The environment variable of an option, for example ``BUFFER_RL_ROLLOUT_BATCH_SIZE``."""
    return ENV_PREFIX + name.upper()


def plugin_kind_of(args_class: type[Section], name: str) -> str:
    """The plugin kind that the option ``name`` refers to; empty for options that are no references."""
    return declared(args_class.model_fields[name], "kind")


def declared(field: FieldInfo, what: str) -> str:
    """What ``option`` was given as ``what``, such as kind or metavar; an empty text without."""
    extra = field.json_schema_extra
    return str(extra.get(what, "")) if isinstance(extra, dict) else ""


def item_of_mapping(known: Mapping[str, FieldInfo], name: str) -> tuple[str, str]:
    """The option and its item that ``name``, which is no option, stands for (``option(prefix=…)``); or empty texts."""
    for owner, field in known.items():
        prefix = declared(field, "prefix")
        if prefix and name.startswith(prefix) and len(name) > len(prefix):
            return owner, name.removeprefix(prefix)
    return "", ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean …?`` with those of the known names (options, their flags or variables, or plugin kinds) that other
    toolkits call ``name`` (``synonyms.yaml``), else the nearest one; or an empty text."""
    names = {each: _plain(each) for each in known}
    synonyms = yaml.safe_load(resources.files("buffer_rl.options").joinpath("synonyms.yaml").read_text("utf-8"))
    same: list[str] = []
    for wanted in _tails(_plain(name)):
        same = same or [each for each, plain in names.items() if wanted in (plain, *synonyms.get(plain, ()))]
    near = difflib.get_close_matches(_plain(name), names.values(), n=1, cutoff=0.6)
    found = same or [each for each, plain in names.items() if plain in near][:1]
    return f"did you mean {' or '.join(found)}?" if found else ""


def _tails(name: str) -> list[str]:
    """``a.b.c``, as nested configurations have it: ``a.b.c``, ``b_c``, ``c``."""
    parts = name.split(".")
    return [name, *("_".join(parts[-length:]) for length in (2, 1) if length < len(parts))]


def _plain(name: str) -> str:
    return name.removeprefix(ENV_PREFIX).lstrip("-").replace("-", "_").lower()
