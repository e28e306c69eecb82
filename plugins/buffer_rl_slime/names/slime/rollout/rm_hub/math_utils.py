"""The reward math."""

from __future__ import annotations

from buffer_rl_slime.missing import missing
from buffer_rl_slime.rewards import extract_answer, grade_answer_verl

__getattr__ = missing(__name__)
__all__ = [
    "extract_answer",
    "grade_answer_verl",
]
