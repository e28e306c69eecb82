from __future__ import annotations

import pytest

from buffer_rl.records.groups import Sample, Status
from rm_hub.boxed import score_f1, score_gpqa


@pytest.mark.parametrize(
    ("response", "label", "f1", "gpqa"),
    [
        (r"A or \boxed{B}", "B", 1.0, 1.0),
        (r"\boxed{B} no \boxed{C}", "C", 1.0, 1.0),
        (r"\boxed{B} no \boxed{C}", "B", 0.0, 0.0),
        (r"\boxed{C}</think> so it is", "C", 1.0, 1.0),
        (r"\boxed{\text{(C)}}", "C", 0.0, 1.0),
        ("Answer: C", "C", 0.0, 0.0),
        (r"\boxed{C", "C", 0.0, 0.0),
    ],
)
def test_what_the_last_box_holds_is_graded(response: str, label: str, f1: float, gpqa: float) -> None:
    sample = Sample(response=response, label=label, status=Status.COMPLETED)
    assert (score_f1(None, sample), score_gpqa(None, sample)) == (f1, gpqa)
    assert sample.response == response
    sample.status = Status.TRUNCATED
    assert (score_f1(None, sample), score_gpqa(None, sample)) == (0.0, 0.0)
