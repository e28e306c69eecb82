"""The table of plugin kinds, by name. Entry points of a kind stand in the group ``buffer_rl.NAME``."""

from __future__ import annotations

from collections.abc import Mapping

from buffer_rl.errors import ConfigError
from buffer_rl.kinds import agent, data, engine, objective, reward, rollout, trainer
from buffer_rl.kinds.kind import PluginKind

KINDS: Mapping[str, PluginKind] = {
    kind.name: kind
    for audience in (reward, rollout, agent, data, objective, trainer, engine)
    for kind in audience.KINDS
}


def kind_named(name: str) -> PluginKind:
    """The plugin kind called ``name``. Raises ConfigError listing the known kinds."""
    if name not in KINDS:
        raise ConfigError(f"there is no plugin kind {name!r}", expected=f"one of {', '.join(KINDS)}")
    return KINDS[name]
