from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import Sample, Status
from rm_hub.ifeval import INSTRUCTIONS, score, score_fraction

AT_LEAST, LESS = "at least", "less than"

VECTORS: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["Sun", "moon"]}, "The sun, the Moon.", "The sun."),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": AT_LEAST}, "a b A", "a banana"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": LESS}, "a banana", "a b A"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "The Cat."),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": AT_LEAST}, "qQ", "q"),
    ("length_constraints:number_words", {"num_words": 3, "relation": AT_LEAST}, "one two, three", "one two"),
    ("length_constraints:number_words", {"num_words": 3.0, "relation": LESS}, "one two", "one two three"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na\n***\nb\n***", "a\n***\n***\nb"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] and [town]", "[name] and town"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. more", "Bye. P.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n** b"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b c**", "*a* and * *"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\nx\nSection 2\ny",
        "Section 1\nSection two",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', '{"a": [1}'),
    ("detectable_format:title", {}, "<<A day>>\ntext", "<<  >>\n<<A\nday>>"),
    ("startend:start_checker", {"start_phrase": "Dear"}, "dear Sir", "My dear Sir"),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, 'So. "Any questions?"', "Any questions? No."),
    ("startend:quotation", {}, '""', '"'),
    ("change_case:english_capital", {}, "ALL 3 BIG", "ALL 3 bIG"),
    ("change_case:english_lowercase", {}, "all 3 small", "All 3 small"),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": AT_LEAST},
        "NOW and HERE",
        "Now and HERE",
    ),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
]


def row(response: str, *instructions: tuple[Any, Any], status: Status = Status.COMPLETED) -> Sample:
    metadata = {"instruction_id_list": [i[0] for i in instructions], "kwargs": [i[1] for i in instructions]}
    return Sample(response=response, metadata=metadata, status=status)


@pytest.mark.parametrize(("name", "kwargs", "followed", "broken"), VECTORS)
def test_an_instruction_is_followed_or_not(name: str, kwargs: dict[str, Any], followed: str, broken: str) -> None:
    assert score(None, row(followed, (name, kwargs))) == 1.0
    assert score(None, row(broken, (name, kwargs))) == 0.0


def test_every_instruction_has_a_vector() -> None:
    assert {vector[0] for vector in VECTORS} == set(INSTRUCTIONS)


def test_all_instructions_must_be_followed_and_the_fraction_counts_them() -> None:
    both = [("punctuation:no_comma", None), ("startend:quotation", {"num_words": None})]
    assert score(None, row("plain", *both)) == 0.0
    assert score_fraction(None, row("plain", *both)) == 0.5
    assert score_fraction(None, row('x</think> "plain"', *both)) == 1.0


def test_an_empty_or_truncated_response_follows_nothing() -> None:
    rule = ("punctuation:no_comma", {})
    assert score(None, row(" ", rule)) == 0.0
    assert score_fraction(None, row("a, b</think>", rule)) == 0.0
    assert score_fraction(None, row("fine", rule, status=Status.TRUNCATED)) == 0.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "does not say which instructions"),
        ({"instruction_id_list": [], "kwargs": []}, "does not say which instructions"),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": []}, "of one length"),
        ({"instruction_id_list": ["startend:qoutation"], "kwargs": [{}]}, "no such instruction"),
        ({"instruction_id_list": [["startend:quotation"]], "kwargs": [{}]}, "no such instruction"),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": [{"loud": True}]}, "'loud': True"),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": ["loud"]}, "its kwargs are 'loud'"),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{}]}, "the arguments end_phrase"),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": 3}]}, "end_phrase is 3"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": "sun"}]}, "a list of texts"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "more than"}],
            },
            "'at least' or 'less than'",
        ),
        (
            {"instruction_id_list": ["length_constraints:number_paragraphs"], "kwargs": [{"num_paragraphs": 2.5}]},
            "whole",
        ),
    ],
)
def test_a_wrong_instruction_is_an_error_and_never_a_zero(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(None, Sample(response="text", metadata=metadata, status=Status.TRUNCATED))
