"""The embedded engine answers each case of the suite as its case says, and as a SGLang server where it is told to."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
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


DROPPED = {
    *("/generate: a negative seed", "/generate: max_new_tokens -1", "/generate: no JSON"),
    *("/generate: two texts", "/generate: two ids", "/generate: parameters for each prompt", "/generate: an id twice"),
    *("/generate: log-probabilities for one of two", "/generate: an unknown sampling parameter"),
    *("/generate: an unknown field", "/generate: experts of a model without them"),
    *("/v1/completions: token ids", "/v1/completions: two lists of token ids"),
    *("/v1/chat/completions: token ids in place of the template", "/v1/chat/completions: token ids back"),
    *("/v1/chat/completions: weight versions back", "/v1/chat/completions: token ids in a stream"),
}
"""What sglang-router drops, or refuses before an engine sees it."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "differs"), [("smg", set()), ("sglang", DROPPED)])
def test_through_a_router_the_cases_are_answered_the_same_but_for_what_it_drops(reference, tmp_path, name, differs):
    package = PluginRegistry().resolve("router", name)
    pytest.importorskip(package.package)
    cases, log = all_cases(reference), str(tmp_path / "log")
    with ExitStack() as stack:
        url = stack.enter_context(free_url())
        stack.enter_context(serving(embedded_command(reference.folder("0"), url, imitate=False), url, log))
        router = package(compose(CORE_SECTIONS).model_validate({}), str(tmp_path / "router.log"))
        stack.callback(router.stop)
        router.wait_ready(60)
        router.add(url)
        results = asyncio.run(run_all(cases, url, reference, is_sglang=False, router=router.url))
    wrong = {f"{case.topic}: {case.name}" for case, own in zip(cases, results, strict=True) if own.wrong}
    assert wrong == differs | {"/generate: by PUT"}
