"""A reward that falls linearly with the distance between the answer and the sum."""

from __future__ import annotations

from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.records.groups import Sample
from buffer_rl_sums.options import SumsOptions


@rows_may_choose  # it reads whole numbers, and runs nothing of what a row or a response says
def score(args: SumsOptions, sample: Sample) -> float:
    """1 for the sum, 0 at ``--sums-tolerance`` and beyond, and for what is no number."""
    answer = sample.response.strip()
    if not (answer.isascii() and answer.isdigit() and len(answer) <= 9):
        return 0.0
    return max(0.0, 1.0 - abs(int(answer) - int(sample.label)) / args.sums_tolerance)
