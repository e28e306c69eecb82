"""What talks to SGLang servers."""

from __future__ import annotations

from buffer_rl_slime.missing import missing

__getattr__ = missing(__name__)
