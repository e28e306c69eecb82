"""Weights that are published in mid-response: each token's log-probability is that of its span's version."""

from __future__ import annotations

import random

import pytest

from buffer_rl.embedded.cache import PrefixCache
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.tensor import TensorTransport
from harness.publications import Versions, answers_while_published, publisher_of

TOLERANCE = 1e-5
STALE = 1e-2
"""Less than what tokens over a cache of other weights are off by, and far more than rounding."""
ENGINE_OPTIONS = {"engine_max_running_requests": 8}


class KeptPrefixes(PrefixCache):
    """A prefix cache that no publication empties."""

    def clear(self) -> None:
        pass


@pytest.fixture(scope="module")
def versions(model_folder):
    return Versions(model_folder("qwen3"))


def worst_gap(scheduler, versions, make_request, random_prompt, *, mode):
    """Publishes three versions while groups and single requests wait, run and end; fewer slots than requests."""
    rng = random.Random(0)
    groups = [random_prompt(rng, length) for length in (5, 60)]
    requests = [make_request(f"g{i}", groups[i % 2], seed=i, max_new_tokens=20 + i) for i in range(16)]
    requests += [make_request(f"s{i}", random_prompt(rng, 3 + i), seed=i, max_new_tokens=30) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    finished = []
    for version, steps in ((1, 9), (2, 1), (3, 6)):
        for _ in range(steps):
            finished += scheduler.step()
        scheduler.pause(mode)
        assert scheduler.flush() == (mode == "retract")
        scheduler.decoder.load(versions.module(version))
        scheduler.weights_changed(str(version))
        scheduler.resume()
    while scheduler.has_work:
        finished += scheduler.step()
    assert len(finished) == len(requests)
    spans = {r.rid: [(s["version"], s["start"], s["end"]) for s in r.version_spans()] for r in requests}
    assert max(map(len, spans.values())) == 4
    return max(versions.gap(r.prompt_ids, r.output_ids, r.log_probs, spans[r.rid]) for r in requests)


@pytest.mark.parametrize("deterministic", [False, True])
def test_log_probabilities_are_those_of_the_version_that_drew_each_token(
    deterministic, versions, make_scheduler, make_request, random_prompt
):
    scheduler = make_scheduler(running=6, deterministic=deterministic)
    assert worst_gap(scheduler, versions, make_request, random_prompt, mode="retract") < TOLERANCE


@pytest.mark.parametrize("kept", ["prefixes", "running requests"])
def test_with_a_cache_of_the_weights_before_they_are_of_no_version(
    kept, versions, make_scheduler, make_request, random_prompt
):
    scheduler = make_scheduler(running=6)
    if kept == "prefixes":
        scheduler.prefixes = KeptPrefixes(65536)
    mode = "retract" if kept == "prefixes" else "in_place"
    assert worst_gap(scheduler, versions, make_request, random_prompt, mode=mode) > STALE


@pytest.mark.parametrize("transport", [DiskTransport, TensorTransport])
async def test_the_same_holds_for_publications_to_an_engine_that_answers(transport, engines, model_folder, tmp_path):
    versions = Versions(model_folder("qwen3"))
    with EngineControlClient([engines[0].url]) as control:
        publisher = publisher_of(versions, transport, control, tmp_path)
        assert publisher.try_retraction()
        publisher.publish(0)
        async with EngineClient(engines[0].url, [engines[0].url]) as client:
            answers, metrics = await answers_while_published(
                client, publisher, versions, num_tokens=200, most_versions=12
            )
        publisher.close()
    assert len(answers) == 42
    assert any(of_one["perf/retracted_tokens"] > 0 for of_one in metrics)
    assert any(len(result.spans) > 1 for _, result in answers)
    for prompt, result in answers:
        spans = [(span.version, span.start, span.end) for span in result.spans]
        assert versions.gap(prompt, result.output_ids, result.log_probs, spans) < TOLERANCE
