from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import Sample, Status
from rm_hub.exact_match import score


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("woyyelrans", "woyyelrans", 1.0),
        (" woyyelrans\n", "woyyelrans", 1.0),
        ("woyyelrans", " woyyelrans ", 1.0),
        ("woyyelrans!", "woyyelrans", 0.0),
        ("woyyelrans woyyelrans", "woyyelrans", 0.0),
        ("woyyelran", "woyyelrans", 0.0),
        ("Woyyelrans", "woyyelrans", 0.0),
        ("woyy elrans", "woyyelrans", 0.0),
        ("", "woyyelrans", 0.0),
        ("", "", 1.0),
        ("42", 42, 1.0),
        ("42.0", 42, 0.0),
        ("colour", ["color", "colour"], 1.0),
        ("colors", ["color", "colour"], 0.0),
    ],
)
def test_the_whole_answer_must_equal_the_label(response: str, label: Any, expected: float) -> None:
    sample = Sample(response=response, label=label, status=Status.COMPLETED)
    assert score(None, sample) == expected


@pytest.mark.parametrize("status", [Status.TRUNCATED, Status.ABORTED, Status.FAILED, Status.PENDING])
def test_a_right_answer_without_an_end_token_earns_nothing(status: Status) -> None:
    assert score(None, Sample(response="yes", label="yes", status=status)) == 0.0


@pytest.mark.parametrize("label", [None, {}, [], [None], {"answer": "yes"}])
def test_a_missing_label_is_an_error_and_not_a_zero(label: Any) -> None:
    with pytest.raises(RewardError, match="--label-key"):
        score(None, Sample(response="yes", label=label, status=Status.TRUNCATED))
