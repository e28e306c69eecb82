"""An answer that the response itself refuses, leaves open among several, or never states earns nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.records.groups import Sample, Status
from rm_hub import boxed, dapo, deepscaler, exact_match, f1, gpqa, ifeval, math, numeric, reasoning_gym
from rm_hub.doubt import joined, taken_back

ARGS = SimpleNamespace(rollout_stop=[], rollout_skip_special_tokens=True)
Score = Callable[[Any, Sample], float]


def graded(score: Score, response: str, label: Any, **fields: Any) -> float:
    return score(ARGS, Sample(response=response, label=label, status=Status.COMPLETED, **fields))


REFUSED = [
    "34 is wrong", "34 is incorrect.", "34 is not the answer", "34 apples are wrong", "34 does not work", "34 (wrong)",
    "The answer is not 34", "The answer isn't 34.", "It cannot be 34", "not 34", "Neither 33 nor 34", "33, not 34",
    "$34$ is wrong", "The answer is $34$, which is wrong.", "The answer is 34. That is wrong.", "It is not equal to 34",
    "The answer is 34. No wait, that's wrong.", r"\boxed{34} is wrong", r"The answer is not \boxed{34}.",
    r"\boxed{34}. No, that's not right", r"\boxed{34 \text{ is wrong}}", r"\boxed{\text{not } 34}", "Wrong answer: 34",
    "This is not the answer: 34", "It is unlikely to be 34", "#### 34\nThat is wrong.", "34? No.", r"x \neq 34",
]  # fmt: skip
OPEN = [
    "The answer is 33 or maybe 34", "33 or 34", "33 and 34", "33, 34", "either 33 or 34", "maybe 33, maybe 34",
    "The answer is 33. Or maybe 34.", "$33$ or $34$", "x = 33 or maybe x = 34", r"\boxed{33} or \boxed{34}",
    r"\boxed{33}, \boxed{34}", r"\boxed{33} \boxed{34}", r"\boxed{33}. So in all \boxed{34}.",
    r"\boxed{33 \text{ or maybe } 34}", r"\boxed{34}, or maybe 33",
]  # fmt: skip


@pytest.mark.parametrize("response", REFUSED + OPEN)
@pytest.mark.parametrize("score", [numeric.score, math.score])
def test_a_number_that_is_refused_or_one_of_several_is_no_answer(score: Score, response: str) -> None:
    assert graded(score, response, "34") == 0.0
    assert graded(score, response, "33") == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "It is not hard to see that the answer is 34.", "I was wrong: 34", "In 2 or 3 steps we find that it is 34",
        "not 33 but 34", "It isn't 33, it's 34", "The answer isn't 33. It is 34.", "No, 34", "Probably 34", "Maybe 34",
        "34. This is not a hard problem.", "The total is 34, which is not surprising.", "34 (or 34.0)",
        "Since 7 is wrong, the answer is 34", "We cannot use 7, so 34", "Is it 33 or 34? It is 34.", "x = 3, y = 34",
        "<answer>34</answer>", "First 12, then 34", "\\boxed{34}\nI double checked, and it is not wrong.",
        r"\boxed{34}. It is not possible to have fewer.", r"\boxed{34}, so again \boxed{34.0}", "#### 34\n#### 34.0",
    ],
)  # fmt: skip
def test_doubt_that_is_not_about_the_final_number_costs_nothing(response: str) -> None:
    assert graded(numeric.score, response, 34) == 1.0


REFUSED_LETTERS = [
    "A is incorrect", "A is wrong.", "(A) is incorrect", "**A** is incorrect", "Answer A is incorrect", "not A",
    "The answer is not A", "The answer isn't A", "Option A is wrong", "Option A is not right", "It cannot be A",
    "I don't think it is A", "Answer: A. That is wrong.", "The wrong answer is A", "Everything except A",
    "Ruled out: A", r"\boxed{A} is wrong", r"not \boxed{A}", r"\boxed{\text{not A}}", r"\boxed{A is incorrect}",
    "B. No wait, C or A", "I choose B or A", "Maybe B, maybe A", "B or maybe A", "Answer: B, or maybe A",
    "Answer: A or B", "B A", "B/A", r"\boxed{B} or \boxed{A}", r"\boxed{B or A}", "A. No wait, A or C",
]  # fmt: skip


@pytest.mark.parametrize("response", REFUSED_LETTERS)
@pytest.mark.parametrize("score", [gpqa.score, gpqa.score_lenient, boxed.score_gpqa])
def test_a_letter_that_is_refused_or_one_of_several_is_no_choice(score: Score, response: str) -> None:
    assert graded(score, response, "A") == 0.0


@pytest.mark.parametrize("score", [gpqa.score, gpqa.score_lenient])
def test_boxes_with_different_letters_are_no_choice_and_repeats_are_one(score: Score) -> None:
    assert graded(score, r"\boxed{B}. Then \boxed{A}", "A") == 0.0
    assert graded(score, r"\boxed{A}. Again \boxed{\text{A}}", "A") == 1.0


@pytest.mark.parametrize(
    "response",
    ["B is wrong. So A", "A, not B", "B, C and D are wrong. A", "A is correct, and B is wrong", "I am not sure, but A",
     "The answer is A because B is wrong.", "Between A and B, I choose A", "Answer: A, since B doesn't work"],
)  # fmt: skip
def test_letters_that_are_refused_leave_the_chosen_one(response: str) -> None:
    assert graded(gpqa.score_lenient, response, "A") == 1.0


def test_the_words_of_a_choice_are_refused_like_its_letter() -> None:
    choices = {"choices": ["pure gold", "alloy"]}
    for response, reward in (("It is pure gold", 1.0), ("It is not pure gold", 0.0), ("pure gold is wrong", 0.0)):
        assert graded(gpqa.score_lenient, response, "A", metadata=choices) == reward


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\text{cat}", "act"), ("act", r"\text{cat}"), ("cat", "act"), (r"\mathrm{cat}", "act"), ("evil", "live"),
        (r"\text{listen}", r"\text{silent}"), (r"\text{no}", "on"), (r"\text{the cat}", r"\text{act the}"),
        ("4 cats", "4 acts"), (r"\{cat, dog\}", r"\{act, god\}"), ("abc", "cab"), (r"\text{e}", "2.718281828459045"),
    ],
)  # fmt: skip
def test_words_are_no_products_of_their_letters(one: str, other: str) -> None:
    for answer, label in ((one, other), (other, one)):
        assert graded(deepscaler.score_boxed, rf"\boxed{{{answer}}}", label) == 0.0
        assert graded(deepscaler.score, rf"</think>\boxed{{{answer}}}", label) == 0.0
        assert graded(math.score, rf"\boxed{{{answer}}}", label) == 0.0
        assert graded(math.score, rf"\boxed{{{answer}}}", answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "label"),
    [("ab", "ba"), ("2xy", "2yx"), ("abc+d", "d+cba"), (r"\text{odd}", "odd"), ("x^2y", "yx^2")],
)
def test_products_of_letters_in_any_order_are_equal(answer: str, label: str) -> None:
    assert graded(deepscaler.score_boxed, rf"\boxed{{{answer}}}", label) == 1.0
    assert graded(math.score, rf"\boxed{{{answer}}}", label) == 1.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"6:30 \text{ p.m.}", r"6:30\text{ a.m.}", 0.0), (r"20\% \text{ loss}", r"20\%\text{ gain}", 0.0),
        (r"5\text{ miles north}", r"5\text{ miles south}", 0.0), (r"6\text{ PM}", r"6\text{ p.m.}", 1.0),
        (r"6\text{ p.m.}", "6", 1.0), (r"5\text{ more apples}", r"5\text{ more}", 1.0),
        (r"\text{6 p.m.}", r"\text{6 a.m.}", 0.0),
    ],
)  # fmt: skip
def test_a_number_with_the_opposite_word_is_another_answer(one: str, other: str, same: float) -> None:
    for answer, label in ((one, other), (other, one)):
        assert graded(deepscaler.score_boxed, rf"\boxed{{{answer}}}", label) == same
        assert graded(math.score, rf"\boxed{{{answer}}}", label) == same
        assert graded(dapo.score_binary, f"Answer: {answer}", label) == same


THINKING = [
    (numeric.score, "34", "34"),
    (numeric.score, r"\boxed{34}", "34"),
    (math.score, r"\boxed{34}", "34"),
    (deepscaler.score_boxed, r"\boxed{34}", "34"),
    (dapo.score_binary, "Answer: 34", "34"),
    (f1.score, "Broncos", "Broncos"),
    (f1.score_exact, "Broncos", "Broncos"),
    (gpqa.score, "Answer: A", "A"),
    (gpqa.score_lenient, "A", "A"),
    (boxed.score_f1, r"\boxed{Broncos}", "Broncos"),
    (boxed.score_gpqa, r"\boxed{A}", "A"),
    (exact_match.score, "34", "34"),
]


@pytest.mark.parametrize(("score", "answer", "label"), THINKING)
def test_what_stands_in_a_thinking_that_never_ends_is_no_answer(score: Score, answer: str, label: str) -> None:
    assert graded(score, answer, label) == 1.0
    assert graded(score, f"<think>{answer}", label) == 0.0
    assert graded(score, f"<think>x</think>no <think>{answer}", label) == 0.0


@pytest.mark.parametrize(("score", "answer", "label"), [row for row in THINKING if row[0] is not exact_match.score])
def test_a_prompt_may_have_begun_the_thinking(score: Score, answer: str, label: str) -> None:
    assert graded(score, answer, label, prompt="Q<think>\n") == 0.0
    assert graded(score, f"x</think>{answer}", label, prompt="Q<think>\n") == 1.0
    assert graded(score, answer, label, prompt="Q<think>\n\n</think>\n\n") == 1.0


def test_deepscalers_box_counts_after_the_last_thinking_only() -> None:
    assert graded(deepscaler.score, r"x</think>\boxed{34}", "34") == 1.0
    assert graded(deepscaler.score, r"x</think>no <think>\boxed{34}", "34") == 0.0


def test_instructions_and_tasks_see_no_thinking_that_never_ends() -> None:
    commas = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert graded(ifeval.score, "no comma", None, metadata=commas) == 1.0
    assert graded(ifeval.score, "<think>no comma", None, metadata=commas) == 0.0
    pytest.importorskip("reasoning_gym")
    entry = {"question": "?", "answer": "34", "metadata": {}}
    task = {"source_dataset": "lcm", "entry": entry}
    assert graded(reasoning_gym.score_partial, "it is 34", None, metadata=task) > 0.0
    assert graded(reasoning_gym.score_partial, "<think>it is 34", None, metadata=task) == 0.0


@pytest.mark.parametrize(
    "response",
    ["Answer: 34 is wrong", r"Answer: \text{not } 34", r"Answer: 34 \text{ is wrong}", "Answer: 34\nThat is wrong.",
     "Wrong answer: 34", "This is not the answer: 34", "Answer: 33 or maybe 34"],
)  # fmt: skip
def test_an_answer_line_that_is_refused_is_wrong(response: str) -> None:
    assert graded(dapo.score, response, "34") == -1.0


def test_of_boxes_that_are_stated_one_after_the_other_the_graders_named_after_others_read_the_last() -> None:
    for score, start in ((deepscaler.score_boxed, ""), (deepscaler.score, "</think>")):
        assert graded(score, rf"{start}\boxed{{33}}. So in all \boxed{{34}}.", "34") == 1.0
        assert graded(score, rf"{start}\boxed{{33}} or \boxed{{34}}.", "34") == 0.0
        assert graded(score, rf"{start}not \boxed{{34}}.", "34") == 0.0
    assert graded(dapo.score, "Answer: 33\nAnswer: 34", "34") == 1.0
    assert graded(boxed.score_f1, r"\boxed{cat}. No: \boxed{dog}", "dog") == 1.0
    assert graded(boxed.score_f1, r"\boxed{cat} or \boxed{dog}", "dog") == 0.0


def test_different_marks_are_several_answers() -> None:
    assert graded(numeric.score, "#### 33\n#### 34", "34") == 0.0


def test_no_text_beside_an_answer_takes_long() -> None:
    for text in ("not " * 10_000, "is not a " * 5_000, "or maybe " * 5_000, "a " * 20_000, "(" * 40_000):
        assert not joined(text)
        taken_back(text, text)
        for answer, label, score in (("34", 34, numeric.score), (r"\boxed{34}", "34", math.score)):
            assert graded(score, f"{text}{answer}{text}{answer}{text}", label) in (0.0, 1.0)
        assert graded(gpqa.score_lenient, f"{text}Answer: A {text}", "A") in (0.0, 1.0)
    assert graded(numeric.score, "#### 34\n" * 10_000, 34) == 1.0
    assert graded(numeric.score, r"\boxed{" * 20_000 + "34" + "}" * 20_000, 34) == 1.0
