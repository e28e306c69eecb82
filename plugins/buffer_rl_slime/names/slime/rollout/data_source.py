"""Data sources."""

from __future__ import annotations

from buffer_rl_slime.data_source import DataSource, pop_first
from buffer_rl_slime.missing import missing

__getattr__ = missing(
    __name__,
    {
        "RolloutDataSource": "the Buffer reads --prompt-data itself",
        "RolloutDataSourceWithBuffer": "the Buffer reads --prompt-data and keeps the queue itself",
    },
)
__all__ = [
    "DataSource",
    "pop_first",
]
