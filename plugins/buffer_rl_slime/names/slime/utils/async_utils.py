"""Coroutines from synchronous functions."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.running import run

__getattr__ = missing(
    __name__,
    {
        "get_async_loop": "coroutines run on the rollout's own event loop; use run(coroutine)",
    },
)
__all__ = [
    "run",
]
