from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import GroupUid, Sample, Status
from rm_hub.answers import after_reasoning, labels_of, last_boxed, last_line, response_of


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{1} and \boxed{ 2 }", "2"),
        (r"\boxed {3}", "3"),
        (r"\fbox{4}", "4"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed", None),
        ("7", None),
    ],
)
def test_the_last_box_is_read_to_the_brace_that_closes_it(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


def test_the_answer_stands_after_the_last_end_of_the_reasoning() -> None:
    assert after_reasoning("a</think>b</think> c") == " c"
    assert after_reasoning("no reasoning") == "no reasoning"
    assert last_line("one\n two \n\n ") == "two"
    assert last_line("") == ""


@pytest.mark.parametrize("label", [None, True, "", " ", [], [None], {"a": 1}, ["a", ""]])
def test_a_missing_label_is_an_error_that_names_the_row(label: Any) -> None:
    with pytest.raises(RewardError, match="data:4:0: the label is"):
        labels_of(Sample(label=label, uid=GroupUid("data", 4, 0)), reward="rm")


def test_labels_are_text_or_numbers_or_lists_of_them() -> None:
    assert labels_of(Sample(label=["a", 2, 0.5]), reward="rm") == ["a", "2", "0.5"]
    assert labels_of(Sample(label=0), reward="rm") == ["0"]


@pytest.mark.parametrize(
    ("grader", "response", "label"),
    [
        ("exact_match:score", "42###", "42"),
        ("numeric:score", "#### 42####", "42"),
        ("numeric:score", "it is 42\n2.", "42"),
        ("dapo:score", "Answer: 42###", "42"),
        ("math:score", "x + 1###", "x + 1"),
        ("ifeval:score", "all 42###", ["startend:end_checker", {"end_phrase": "all 42"}]),
        ("f1:score_exact", "yes\nQ2:", "yes"),
        ("gpqa:score", "B\nQ2:", "B"),
    ],
)
def test_a_stop_string_at_the_end_of_a_response_is_no_part_of_the_answer(
    grader: str, response: str, label: Any
) -> None:
    if grader.startswith("math"):
        pytest.importorskip("math_verify")
    module, name = grader.split(":")
    score = getattr(importlib.import_module(f"rm_hub.{module}"), name)
    args = SimpleNamespace(rollout_stop=["#", "###", "####", "\nQ2:", "\n2."])
    sample = Sample(response=response, label=label, status=Status.COMPLETED)
    if grader.startswith("ifeval"):
        sample.metadata = {"instruction_id_list": label[:1], "kwargs": label[1:]}
    assert score(args, sample) == 1.0
    assert score(SimpleNamespace(rollout_stop=[]), sample) < 1.0
    assert sample.response == response


def test_a_stop_string_within_a_response_stays() -> None:
    args = SimpleNamespace(rollout_stop=["</search>"])
    text = "<search>a</search> found it"
    assert response_of(args, Sample(response=text)) == text
    assert response_of(None, Sample(response=text)) == text


@pytest.mark.parametrize(
    "end", ["<|im_end|>", "</s>", "<eos>", "<end_of_turn>", "<\uff5cend\u2581of\u2581sentence\uff5c>"]
)
def test_an_end_token_that_is_shown_is_no_part_of_the_answer(end: str) -> None:
    shown = SimpleNamespace(rollout_stop=[], rollout_skip_special_tokens=False)
    hidden = SimpleNamespace(rollout_stop=[], rollout_skip_special_tokens=True)
    assert response_of(shown, Sample(response=f"72{end}")) == "72"
    assert response_of(shown, Sample(response=f"72{end} more")) == f"72{end} more"
    assert response_of(hidden, Sample(response=f"72{end}")) == f"72{end}"  # then it is text that the model wrote
