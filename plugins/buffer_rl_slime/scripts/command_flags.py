"""The flags of a launch command, and their values."""

from __future__ import annotations

from collections.abc import Iterable

from buffer_rl.errors import ConfigError
from buffer_rl_slime.scripts.shell_expansion import Argument
from buffer_rl_slime.scripts.shell_values import as_run, shown

SFT = "sft_loss"

Flags = dict[str, list[Argument]]
"""The values of each flag, by its name without dashes."""


def value_of(flags: Flags, name: str) -> str:
    """The values of a flag as one text; empty without them."""
    return " ".join(argument.text for argument in flags.get(name, ()))


def steps_per_rollout(flags: Flags) -> int:
    """Optimizer steps on each rollout. Raises ValueError where the flags do not say."""
    if "global-batch-size" not in flags:
        return int(value_of(flags, "num-steps-per-rollout") or "1")
    samples = int(value_of(flags, "rollout-batch-size")) * int(value_of(flags, "n-samples-per-prompt") or "1")
    return samples // int(value_of(flags, "global-batch-size"))


def flags_of(arguments: Iterable[Argument]) -> tuple[Flags, set[str], dict[str, str]]:
    """Each flag's values, the flags that came again, and ``file:line`` of each. Raises ConfigError for values without a
    flag before them."""
    flags: Flags = {}
    again: set[str] = set()
    where: dict[str, str] = {}
    values: list[Argument] | None = None
    for argument in arguments:
        if argument.text.startswith("--") and len(argument.text) > 2:
            flag, equals, value = argument.text[2:].partition("=")
            name = flag.replace("_", "-")
            again |= {name} & flags.keys()
            values = [Argument(value, argument.where)] if equals else []
            flags.pop(name, None)
            flags[name], where[name] = values, argument.where
        elif values is None:
            if as_run(argument.text):
                raise ConfigError(f"{shown(argument.text)!r} belongs to no flag", where=argument.where)
        else:
            values.append(argument)
    return flags, again, where
