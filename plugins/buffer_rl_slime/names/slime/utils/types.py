"""Records of a sample."""

from __future__ import annotations

from buffer_rl.records.groups import Sample
from buffer_rl_slime.missing import missing

__getattr__ = missing(__name__)
__all__ = [
    "Sample",
]
