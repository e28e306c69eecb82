"""The import names of slime, for functions that were written for it: re-exports of buffer_rl_slime and buffer_rl."""

from __future__ import annotations

from buffer_rl_slime.missing import missing

__getattr__ = missing(__name__)
