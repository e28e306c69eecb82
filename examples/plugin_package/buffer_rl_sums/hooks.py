"""The hooks of this package."""

from __future__ import annotations

from collections.abc import Sequence

from buffer_rl.plugin.hookspecs import hookimpl


@hookimpl
def buffer_rl_add_options() -> Sequence[str]:
    """``--sums-largest`` and ``--sums-tolerance``."""
    return ["buffer_rl_sums.options:SumsOptions"]
