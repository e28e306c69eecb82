"""A request whose numbers are not finite fails by itself: others do not notice, nor do later ones in its memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

POISON = 98  # the last token of the vocabulary; nothing else in these tests has it
DECODERS = [("llama", False), ("llama", True), ("gpt_neox", True)]


@pytest.fixture
def poisoned(make_scheduler: Any, module: Any) -> Callable[..., Any]:
    """A scheduler over weights that are finite but for the embedding of ``POISON``."""

    def make(architecture: str = "llama", fallback: bool = False, **more: Any) -> Any:
        scheduler = make_scheduler(architecture, fallback=fallback, eos_token_ids={POISON}, **more)
        model = copy.deepcopy(module(architecture))
        with torch.no_grad():
            model.get_input_embeddings().weight[POISON] = math.inf
        scheduler.decoder.load(model)
        return scheduler

    return make


@pytest.fixture
def innocents(make_request: Any) -> Callable[[str], list[Any]]:
    """Requests that never draw ``POISON``: an end token is held back until the last token."""

    def make(name: str) -> list[Any]:
        prompts = [(5, 6, 7), (8, 9), tuple(range(3, 40)), (5, 6, 7), (9, 8, 7), (4, 4), (4, 5), (6, 4)]
        limits = {"max_new_tokens": 40, "min_new_tokens": 40}
        return [make_request(f"{name}{i}", p, seed=i, **limits) for i, p in enumerate(prompts)]

    return make


def results(requests: list[Any]) -> dict[str, Any]:
    return {r.rid[1:]: (r.output_ids, r.log_probs, r.finish_reason) for r in requests}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for rid, (tokens, log_probs, reason) in expected.items():
        assert (found[rid][0], found[rid][2]) == (tokens, reason)
        assert found[rid][1] == pytest.approx(log_probs, abs=1e-5)


@pytest.mark.parametrize(("architecture", "fallback"), DECODERS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_that_is_not_finite_fails_alone_and_leaves_nothing_in_its_slot(
    architecture: str, fallback: bool, deterministic: bool, poisoned: Any, innocents: Any, make_request: Any, run: Any
) -> None:
    options = {"architecture": architecture, "fallback": fallback, "deterministic": deterministic}
    alone = poisoned(**options)
    expected = []
    for name in "ab":
        for request in innocents(name):
            alone.add(request)
        expected.append(results(run(alone)))
        assert all(reason["type"] == "length" for _, _, reason in expected[-1].values())
    scheduler = poisoned(**options)
    bad = [make_request(f"bad{i}", (*range(3, 30), POISON, 4 + i), max_new_tokens=9) for i in range(2)]
    for request in (bad[0], *innocents("a"), bad[1]):
        scheduler.add(request)
    finished = run(scheduler)
    for request in bad:
        assert request.output_ids == []
        assert request.version_spans() == []
        reason = request.finish_reason
        assert (reason["type"], reason["status_code"]) == ("abort", 500)
        assert repr(request.rid) in reason["message"]
        assert "not finite" in reason["message"]
    assert_same(results([r for r in finished if r not in bad]), expected[0])
    for request in innocents("b"):  # they get the slots that the others had
        scheduler.add(request)
    assert_same(results(run(scheduler)), expected[1])


def test_a_request_that_becomes_infinite_keeps_its_tokens_and_the_others_go_on(
    poisoned: Any, innocents: Any, run: Any
) -> None:
    alone, scheduler = poisoned(), poisoned()
    for request in innocents("a"):
        alone.add(request)
    expected = results(run(alone))
    requests = innocents("a")
    for request in requests:
        scheduler.add(request)
    for _ in range(10):
        scheduler.step()
    row = requests[1].row
    with torch.inference_mode():
        row.pool.keys[0, row.slot, :, 0] = math.inf
    run(scheduler)
    found = results(requests)
    tokens, log_probs, reason = found.pop("1")
    assert (len(tokens), len(log_probs), reason["status_code"]) == (11, 11, 500)
    assert "output token 11" in reason["message"]
    assert requests[1].version_spans() == [{"version": "0", "start": 0, "end": 11}]
    assert tokens == expected.pop("1")[0][:11]
    assert_same(found, expected)
    assert scheduler.prefixes.get((8, 9)) is None
    assert scheduler.prefixes.get((5, 6, 7)) is not None


def test_a_prefix_that_is_not_finite_is_not_used_again(poisoned: Any, module: Any, make_request: Any, run: Any) -> None:
    scheduler = poisoned()
    for attempt in range(2):
        requests = [make_request(f"{attempt}{i}", (5, POISON), max_new_tokens=3) for i in range(2)]
        for request in requests:
            scheduler.add(request)
        run(scheduler)
        assert [r.finish_reason["status_code"] for r in requests] == [500, 500]
        assert len(scheduler.prefixes) == 0
        assert requests[0].cached_tokens == 0
    scheduler.decoder.load(module("llama"))
    last = make_request("last", (5, POISON), max_new_tokens=3)
    scheduler.add(last)
    run(scheduler)
    assert len(last.output_ids) == 3


def test_a_slot_that_is_freed_is_zero(make_scheduler: Any, make_request: Any, run: Any) -> None:
    scheduler = make_scheduler()
    for i, length in enumerate((3, 80, 30, 70)):
        scheduler.add(make_request(str(i), tuple(range(3, 3 + i + 2)), seed=i, max_new_tokens=length))
    while scheduler.has_work:
        scheduler.step()
        for pool in scheduler.cache.pools():
            lengths = [row.length for row in pool.rows] + [0] * (pool.keys.shape[1] - len(pool.rows))
            for memory in (pool.keys, pool.values):
                for slot, length in enumerate(lengths):
                    assert not memory[:, slot, :, length:].any()
