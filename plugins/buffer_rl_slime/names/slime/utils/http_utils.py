"""Requests."""

from __future__ import annotations

from buffer_rl_slime.http import get, post
from buffer_rl_slime.missing import missing
from buffer_rl_slime.tools import get_rollout_num_engines

__getattr__ = missing(
    __name__,
    {
        "init_http_client": "nothing has to be initialised",
    },
)
__all__ = [
    "get",
    "get_rollout_num_engines",
    "post",
]
