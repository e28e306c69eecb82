from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.records.groups import Sample, Status
from rm_hub.f1 import score, score_exact


@pytest.mark.parametrize(
    ("response", "label", "f1", "exact"),
    [
        ("Denver Broncos", "Denver Broncos", 1.0, 1.0),
        ("The Denver, broncos!", "denver Broncos", 1.0, 1.0),
        ("Broncos Denver", "Denver Broncos", 1.0, 0.0),
        ("Broncos", "Denver Broncos", 2 / 3, 0.0),  # precision 1, recall 1/2
        ("they were the Denver Broncos", "Denver Broncos", 2 / 3, 0.0),  # precision 2/4, recall 1
        ("Broncos Broncos Broncos", "Broncos", 0.5, 0.0),  # a token counts as often as the label has it
        ("New New York", "New New Jersey", 2 / 3, 0.0),
        ("Panthers", "Denver Broncos", 0.0, 0.0),
        ("Broncos", ["Panthers", "Broncos"], 1.0, 1.0),
        ("7", 7, 1.0, 1.0),
        ("Yes.", "yes", 1.0, 1.0),
        ("yes and no", "yes", 0.0, 0.0),
        ("no", "no idea", 0.0, 0.0),
        ("yes", ["no", "yes"], 1.0, 1.0),
        ("", "Broncos", 0.0, 0.0),
        ("the", "A", 0.0, 0.0),  # of which the rules leave nothing
        ("", "A", 0.0, 0.0),
        ("(a)", "A", 1.0, 1.0),
        ("", "-", 0.0, 0.0),
        ("-", "-", 1.0, 1.0),
        ("Panthers</think>Broncos", "Broncos", 1.0, 1.0),
    ],
)
def test_tokens_shared_with_the_best_label(response: str, label: Any, f1: float, exact: float) -> None:
    sample = Sample(response=response, label=label, status=Status.COMPLETED)
    assert score(None, sample) == pytest.approx(f1)
    assert score_exact(None, sample) == exact
    sample.status = Status.TRUNCATED
    assert (score(None, sample), score_exact(None, sample)) == (0.0, 0.0)
