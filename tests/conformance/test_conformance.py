"""The embedded engine answers each case of the suite as its case says, and as a SGLang server where it is told to."""

from __future__ import annotations

import asyncio

import pytest

from conformance.reference import Reference
from conformance.run import all_cases, embedded_command, free_url, run_all, serving


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(str(tmp_path_factory.mktemp("models")))


def test_there_are_a_hundred_requests_and_no_case_twice(reference):
    cases = all_cases(reference)
    assert sum(step.path != "" for case in cases for step in case.steps) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("imitate", [False, True], ids=["embedded", "as SGLang"])
def test_every_case_is_answered_as_it_says(reference, tmp_path, imitate):
    cases, log = all_cases(reference), str(tmp_path / "log")
    with free_url() as url, serving(embedded_command(reference.folder("0"), url, imitate=imitate), url, log):
        results = asyncio.run(run_all(cases, url, reference, is_sglang=imitate))
    wrong = [f"{case.topic}: {case.name}: {own.wrong}" for case, own in zip(cases, results, strict=True) if own.wrong]
    assert not wrong, "\n".join(wrong)
