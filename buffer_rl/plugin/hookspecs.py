"""The hooks that a pluggy plugin of buffer_rl may implement: one that provides objects, and the lifecycle.

A plugin is a module or an object whose functions are marked with ``hookimpl``; a distribution declares it by an
entry point of the group ``buffer_rl``. A hook may take any subset of the arguments named here. Lifecycle
hooks run in the driver's process, once an event and never once a sample; an exception in one ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pluggy

PROJECT_NAME = "buffer_rl"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagMeaning:
    """What a flag that is no option here means in scripts that were written for another program.

    kind, reason: read "``kind``: ``reason``" in messages. accepted: whether a run takes the flag, and does what
        ``options`` says, which may be nothing. options: names and values of the options that it stands for.
    page: where to read more.
    """

    kind: str
    reason: str
    accepted: bool = False
    options: tuple[tuple[str, str], ...] = ()
    page: str = ""


class Hooks(Protocol):
    """All hook specifications."""

    @hookspec
    def buffer_rl_provide(self, kind: str) -> Mapping[str, object]:
        """Objects of the plugin kind ``kind`` (a key of ``buffer_rl.kinds.table.KINDS``) by the names that users write.

        Called once a process and kind; return an empty mapping for kinds that the plugin has nothing for.
        """

    @hookspec
    def buffer_rl_add_options(self) -> Sequence[type | str]:
        """Option sections of the plugin's own: subclasses of ``buffer_rl.options.section.Section``, or
        ``module:Class``.

        Called before the command line is parsed. Give every option a prefix of the plugin.
        """

    @hookspec
    def buffer_rl_explain_flag(self, name: str, values: Sequence[str]) -> FlagMeaning | None:
        """What a flag that no option takes means, or None. Called where a command line has such a flag; the first
        answer counts. name: without leading dashes, with ``-`` for ``_``. values: what follows it."""

    @hookspec
    def buffer_rl_local_paths(self, config: Any, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values of options that name a model or data which are elsewhere, as local paths, by option; empty if there
        are none. Called once, before models and data are looked at: every process of the run gets these values.

        config: the options. facts: of the checkpoint that the run goes on from (``options`` among them), else empty."""

    @hookspec
    def buffer_rl_configure(self, config: Any) -> None:
        """The options are parsed and checked: ``config`` is the frozen ``args``. Called before Ray is started, and by
        a dry run: check options here, and start nothing."""

    @hookspec
    def buffer_rl_on_rollout_end(self, rollout_id: int, evaluation: bool, metrics: Mapping[str, float]) -> None:
        """A rollout (or an evaluation) ended; ``metrics`` are flat numbers, as they are logged."""

    @hookspec
    def buffer_rl_on_train_step(self, rollout_id: int, step: int, metrics: Mapping[str, float]) -> None:
        """The optimizer took step ``step`` on the groups of ``rollout_id`` and the Buffer committed them."""

    @hookspec
    def buffer_rl_on_weight_update(self, version: int, metrics: Mapping[str, float]) -> None:
        """Every engine serves weight version ``version``: the weights after ``version`` training steps."""
