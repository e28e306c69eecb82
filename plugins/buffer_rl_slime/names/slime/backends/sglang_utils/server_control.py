"""Aborts."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.rollout import abort_servers_until_idle

__getattr__ = missing(__name__)
__all__ = [
    "abort_servers_until_idle",
]
