r"""Graders of text for answers in a box: what the last ``\boxed{...}`` of the response holds is graded as a response.

Source of the names: the prefix ``boxed_`` of slime's ``--rm-type`` (https://github.com/THUDM/slime).
"""

from __future__ import annotations

from typing import Any

from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.records.groups import Sample
from rm_hub import f1, gpqa
from rm_hub.answers import boxed_answers, has_answer


@rows_may_choose
def score_f1(args: Any, sample: Sample) -> float:
    """``rm_hub.f1`` of the answer in the last box; without a box, or with one that is refused beside it, 0.0."""
    return f1.score(args, _unboxed(sample))


@rows_may_choose
def score_gpqa(args: Any, sample: Sample) -> float:
    """``rm_hub.gpqa:score_lenient`` of the answer in the last box; otherwise as ``score_f1``."""
    return gpqa.score_lenient(args, _unboxed(sample))


def _unboxed(sample: Sample) -> Sample:
    *_, answer = ["", *(boxed_answers(sample.response if has_answer(sample) else "") or [])]
    return sample.changed(prompt="", response=answer)
