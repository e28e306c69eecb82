"""The decisions of graders that slime has, too, and that those which differ from slime's are documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.grader_vectors import our_grader, vectors

RM_TYPES = ("math", "deepscaler", "dapo", "f1", "boxed_f1", "gpqa", "boxed_gpqa")
HUBS = Path(__file__).parents[3] / "rm_hub" / "README.md"


@pytest.mark.parametrize("rm_type", RM_TYPES)
def test_every_vector_has_its_reward(rm_type: str) -> None:
    grade = our_grader(rm_type)
    mine = [vector for vector in vectors() if vector.rm_type == rm_type]
    found = {(vector.response[-80:], str(vector.label), grade(vector)) for vector in mine}
    assert found == {(vector.response[-80:], str(vector.label), vector.reward) for vector in mine}


def test_the_vectors_are_of_these_graders_and_each_difference_is_documented() -> None:
    assert {vector.rm_type for vector in vectors()} == set(RM_TYPES)
    differences = {vector.why for vector in vectors() if vector.slime != vector.reward}
    explained = {line.split("|")[1].strip() for line in HUBS.read_text().splitlines() if line.startswith("| ")}
    assert differences <= explained
    assert all(vector.slime != vector.reward for vector in vectors() if vector.why)
