from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import reasoning_gym

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import Sample, Status
from rm_hub.reasoning_gym import score, score_partial


def sample_of(entry: dict[str, Any], response: str, status: Status = Status.COMPLETED) -> Sample:
    metadata = {"source_dataset": entry["metadata"]["source_dataset"], "entry": entry}
    return Sample(prompt=entry["question"], response=response, label=entry["answer"], status=status, metadata=metadata)


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "gcd", "leg_counting"])
def test_the_right_answer_earns_one_and_an_answer_that_contains_it_nothing(name: str) -> None:
    for entry in reasoning_gym.create_dataset(name, seed=3, size=5):
        assert score(None, sample_of(entry, entry["answer"])) == 1.0
        assert score(None, sample_of(entry, f" {entry['answer']}\n")) == 1.0
        assert score(None, sample_of(entry, f"{entry['answer']} or {entry['answer']}7")) == 0.0
        assert score(None, sample_of(entry, "")) == 0.0
        assert score(None, sample_of(entry, entry["answer"], Status.TRUNCATED)) == 0.0


def test_partial_credit_is_the_graders_own() -> None:
    entry = {"question": "?", "answer": "1234", "metadata": {"source_dataset": "chain_sum"}}
    assert score_partial(None, sample_of(entry, "12345678")) == 0.5  # 4 of 8 characters are the answer
    assert score(None, sample_of(entry, "12345678")) == 0.0


def test_an_entry_is_put_together_from_the_row_where_it_has_none() -> None:
    sample = Sample(prompt="2 + 2", label="4", response="4", status=Status.COMPLETED, metadata={"dataset": "chain_sum"})
    assert score(None, sample) == 1.0


@pytest.mark.parametrize(
    ("metadata", "label", "problem"),
    [
        ({}, "4", "which data set"),
        ({"dataset": "no_such_task"}, "4", "has no data set 'no_such_task'"),
        ({"dataset": "chain_sum"}, None, "no answer to compare with"),
        ({"dataset": "chain_sum", "entry": "4"}, "4", "no answer to compare with"),
        ({"dataset": "chain_sum", "entry": {"answer": 4}}, "4", "the grader of 'chain_sum' failed"),
    ],
)
def test_a_row_that_cannot_be_graded_is_an_error_and_not_a_zero(
    metadata: dict[str, Any], label: Any, problem: str
) -> None:
    with pytest.raises(RewardError, match=problem):
        score(None, Sample(response="444", label=label, status=Status.COMPLETED, metadata=metadata))


def test_without_reasoning_gym_the_error_names_the_extra() -> None:
    code = (
        "import sys\n"
        "sys.modules['reasoning_gym'] = None\n"
        "from buffer_rl.records.groups import Sample\n"
        "from rm_hub.reasoning_gym import score\n"
        "try:\n    score(None, Sample(label='4', metadata={'dataset': 'chain_sum'}))\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.startswith("RewardError")
    assert "buffer-rl[examples]" in answer.stdout
