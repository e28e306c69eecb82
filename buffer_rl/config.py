"""Options: typed, flat, frozen; flags, environment and YAML come from the same definitions.

A section is a frozen pydantic model that stands beside its owner (``buffer_rl/rollout/options.py`` …); ``compose``
makes one flat class of all of them. ``args`` everywhere is an instance of that class, so a component's
signature can ask for its own section. Across processes options travel as JSON plus the references of their
sections (``dump_args``, ``load_args``), because a class composed at run time cannot be pickled by name.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all option sections. ``heading`` is the group that ``--help`` shows the options under."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    heading: ClassVar[str] = ""


def option(default: Any, help: str, *, kind: str = "", metavar: str = "", **constraints: Any) -> Any:
    """One option of a section.

    help: one sentence, with the unit where there is one. ``kind``: the option's value is a plugin reference (or a
    list of them) of this plugin kind, checked before anything starts. ``constraints`` go to ``pydantic.Field``.
    """
    extra = {"kind": kind, "metavar": metavar}
    return Field(default, description=help, json_schema_extra=extra, **constraints)
