from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import Sample, Status
from rm_hub.gpqa import choice, score, score_lenient


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The correct answer is (C)", "C"),
        ("The correct answer is C.", "C"),
        ("Answer: **D**", "D"),
        ("Answer: $B$", "B"),
        ("**Answer:** A", "A"),
        ("Answer: A\nNo. Answer: B", "B"),
        ("C", "C"),
        ("long text\n(B).", "B"),
        (r"answer is A, so \boxed{C}", "C"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"answer is A, so \boxed{72}", None),
        ("The answer is Aluminium", None),
        ("The answer is a metal", None),
        ("A or B", None),
        ("", None),
        ("I think B", None),
        ("Answer: I think B", None),
        ("The answer is I think B", None),
        ("The answer: I'd say B", None),
        ("Answer: A metal conducts", None),
        ("Answer: A", "A"),
        ("Answer: I", "I"),
        ("Answer: (A) metals conduct", "A"),
        ("Answer: **A** metals", "A"),
        ("The answer is A because it conducts.", "A"),
        ("The answer is C because I think B is wrong.", "C"),
        ("Answer: C\nI think so", "C"),
        ("Answer: A\nI think so", "A"),
        ("Answer: B or C", None),
        ("Answer: (B) and (C)", None),
        ("Answer: B, C", None),
        ("Answer: B/C", None),
        ("Answer: B, or I am wrong", "B"),
        ("Answer: B, a metal", "B"),
        ("Answer: A</think>Answer: B", "B"),
        ("The answer is C, I think.", "C"),
        ("The answer is B and I am sure.", "B"),
        ("The answer is B, A metal conducts.", "B"),
        ("The answer is A and not B.", "A"),
        ("The answer is A. So: the answer is D or B", None),
        ("The answer is A. Answer: I think C", None),
        ("The answer is B. The answer follows from symmetry.", "B"),
        ("**Answer**: C", "C"),
        ("*Answer*: C", "C"),
        ("Answer: `C`", "C"),
        ("Answer: [C]", "C"),
        ('The answer is "C".', "C"),
        ("The answer is option C.", "C"),
        ("Answer: Option (C)", "C"),
        ("Answer: option B or C", None),
        ('Answer: "B" or "C"', None),
        ("Answer: [B] or [C]", None),
        ("Answer: [B, C]", None),
        ("The answer is B, and A is wrong.", "B"),
        ("The answer is B, and A is right.", None),
        ("The answer is B or A.", None),
        ("The answer is B or A is right", None),
        ("Answer: B, or C", None),
        ("Answer: B (or C)", None),
        ("Answer: D, I and A", None),
    ],
)
def test_the_chosen_letter(response: str, letter: str | None) -> None:
    assert choice(response) == letter


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        ("C", {}),
        ("(c)", {}),
        ("C", {"choices": ["w", "x", "y", "z"]}),
        ("y", {"choices": ["w", "x", "y", "z"]}),
        ("Y!", {"choices": ["w", "x", "y", "z"]}),
        ("y", {"choices": {"A": "w", "B": "x", "C": "y"}}),
        (2, {}),
        ("no letter", {"correct_letter": "c"}),
        ("C", {"valid_letters": ["b", "c"]}),
        (2, {"choices": ["w", "x", "y", "z"]}),
        (0, {"valid_letters": ["c", "b"]}),
    ],
)
def test_a_label_is_a_letter_or_one_of_the_choices(label: Any, metadata: dict[str, Any]) -> None:
    def graded(response: str, status: Status = Status.COMPLETED) -> float:
        return score(None, Sample(response=response, label=label, metadata=metadata, status=status))

    assert graded("Answer: C") == 1.0
    assert graded("Answer: B") == 0.0
    assert graded("C", Status.TRUNCATED) == 0.0


METALS = {"choices": ["pure gold", "pure iron", "alloy", "pure zinc"]}


@pytest.mark.parametrize(
    ("response", "lenient", "strict"),
    [
        ("Answer: C", 1.0, 1.0),
        ("The answer should be c.", 1.0, 0.0),
        ("I choose C", 1.0, 0.0),
        ("Option C is right. Option B is wrong.", 1.0, 0.0),
        ("C is correct, and D is wrong", 1.0, 0.0),
        ("B or C", 0.0, 0.0),
        ("C or B", 0.0, 0.0),
        ("c", 1.0, 0.0),
        (r"\boxed{c}", 1.0, 0.0),
        ("The answer is carbon", 0.0, 0.0),
        ("because", 0.0, 0.0),
        ("It is the alloy.", 1.0, 0.0),
        ("An alloy, not pure gold", 1.0, 0.0),
        ("An alloy of pure gold", 0.0, 0.0),  # two of the choices
        ("alloyed", 0.0, 0.0),
        ("Answer: Z. So C", 1.0, 0.0),  # there is no Z
        ("C</think>B", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_lenient_score_takes_the_likeliest_letter(response: str, lenient: float, strict: float) -> None:
    sample = Sample(response=response, label="C", metadata=METALS, status=Status.COMPLETED)
    assert (score_lenient(None, sample), score(None, sample)) == (lenient, strict)
    sample.status = Status.TRUNCATED
    assert score_lenient(None, sample) == 0.0


@pytest.mark.parametrize(
    ("response", "choices", "expected"),
    [
        ("It is -5", ["5", "7"], 0.0),
        ("It is 2.5", ["5", "7"], 0.0),
        ("It is 1,5 or so", ["5", "7"], 0.0),
        ("It is 5.5", ["5", "7"], 0.0),
        ("It is 5/7", ["5", "-7"], 0.0),
        ("It is 5.", ["5", "-5"], 1.0),
        ("It is -5.", ["-5", "5"], 1.0),
        ("It is 5.", ["-5", "7"], 0.0),
        ("It is non-dominant", ["dominant", "recessive"], 0.0),
        ("COVID-19", ["covid 19", "flu"], 1.0),
        ("It is -CH3", ["CH3", "OH"], 1.0),
        ("It is the group CH3", ["-CH3", "-OH"], 1.0),
    ],
)
def test_a_choice_is_named_as_a_whole(response: str, choices: list[str], expected: float) -> None:
    sample = Sample(response=response, label="A", metadata={"choices": choices}, status=Status.COMPLETED)
    assert score_lenient(None, sample) == expected


@pytest.mark.parametrize(("label", "choices"), [("A", ["B", "A"]), ("x", ["x", "x"])])
def test_a_label_that_may_mean_two_choices_is_an_error(label: str, choices: list[str]) -> None:
    with pytest.raises(RewardError, match="and of no second"):
        score(None, Sample(response="A", label=label, metadata={"choices": choices}))


@pytest.mark.parametrize("label", [None, True, 4, 2.0, "E", "v", ["C"]])
def test_another_label_is_an_error(label: Any) -> None:
    with pytest.raises(RewardError, match="a letter from A to D"):
        score(None, Sample(response="C", label=label, metadata={"choices": ["w", "x", "y", "z"]}))
