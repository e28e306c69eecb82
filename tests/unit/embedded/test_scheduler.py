"""Joining, leaving, sharing prefixes, pausing and changing weights, without HTTP."""

from __future__ import annotations

import random

import pytest

from buffer_rl.embedded.cache import Prefix, PrefixCache


class CountingDecoder:
    """Passes everything on and keeps the sequences that were prefilled and the sizes of the decoded batches."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.shape, self.vocab_size = decoder.shape, decoder.vocab_size
        self.prefilled, self.batches = [], []

    def prefill(self, sequences):
        self.prefilled += sequences
        return self.decoder.prefill(sequences)

    def decode(self, cache):
        self.batches.append(len(cache))
        return self.decoder.decode(cache)


@pytest.fixture
def counted(make_scheduler):
    def make(**more):
        scheduler = make_scheduler(**more)
        scheduler.decoder = CountingDecoder(scheduler.decoder)
        return scheduler

    return make


def test_a_prompt_is_prefilled_once_for_all_its_samples(counted, make_request, run):
    scheduler = counted(running=4)
    prompts = [(5, 6, 7), (8, 9)]
    for prompt in prompts:
        for i in range(8):
            scheduler.add(make_request(f"{prompt}{i}", prompt, seed=i, max_new_tokens=6))
    finished = run(scheduler)
    assert sorted(scheduler.decoder.prefilled) == sorted(prompts)
    assert sorted(r.cached_tokens for r in finished) == [0, 0] + [2] * 7 + [3] * 7
    assert len({tuple(r.output_ids) for r in finished}) == 16


def test_requests_join_and_leave_at_any_step_and_slots_are_refilled(counted, make_request, run):
    scheduler = counted(running=3)
    for i, length in enumerate((2, 8, 3, 5, 1, 4)):
        scheduler.add(make_request(str(i), (5 + i,), max_new_tokens=length))
    finished = run(scheduler)
    assert [len(r.output_ids) for r in sorted(finished, key=lambda r: r.rid)] == [2, 8, 3, 5, 1, 4]
    assert max(scheduler.decoder.batches) == 3
    # The first token of each comes from its prompt's logits, so n tokens take n - 1 decoded rows.
    assert sum(scheduler.decoder.batches) == sum((2, 8, 3, 5, 1, 4)) - 6


def test_nothing_is_left_in_memory_at_the_end(make_scheduler, make_request, random_prompt, run):
    scheduler = make_scheduler(running=5)
    rng = random.Random(0)
    for i in range(12):
        request = make_request(str(i), random_prompt(rng, rng.randrange(1, 90)), max_new_tokens=rng.randrange(1, 60))
        scheduler.add(request)
    run(scheduler)
    assert len(scheduler.cache) == 0
    assert scheduler.idle
    assert scheduler.flush()
    assert list(scheduler.cache.pools()) == []
    assert len(scheduler.prefixes) == 0


def test_a_flush_keeps_the_memory_that_was_used_since_the_last_one(make_scheduler, make_request, run):
    scheduler = make_scheduler()
    held = {}
    for name, prompt in (("short", (5, 6)), ("long", tuple([7] * 70))):  # of two pools
        scheduler.add(make_request(name, prompt, max_new_tokens=3))
        run(scheduler)
        assert scheduler.flush()
        held[name] = scheduler.cache.num_bytes
    assert 0 < held["short"] < held["long"]
    assert scheduler.flush()
    assert scheduler.flush()
    assert scheduler.cache.num_bytes == 0
    scheduler.add(make_request("again", (5, 6), max_new_tokens=3))
    run(scheduler)
    assert scheduler.flush(releases=True)
    assert scheduler.cache.num_bytes == 0


def test_memory_grows_once_for_all_requests_that_join_together(make_scheduler, make_request):
    scheduler = make_scheduler()
    for number in range(5):
        for name in "abc":
            scheduler.add(make_request(f"{number}{name}", (5, 6 + number), max_new_tokens=3))
    scheduler.step()
    (pool,) = scheduler.cache.pools()
    assert (len(pool.rows), pool.keys.shape[1]) == (15, 15)


def test_an_end_token_stops_a_request_and_is_kept_as_its_last_token(make_scheduler, make_request, run):
    scheduler = make_scheduler()
    probe = make_request("probe", (5, 6), seed=3, max_new_tokens=30)
    scheduler.add(probe)
    run(scheduler)
    stop = probe.output_ids[10]
    first = probe.output_ids.index(stop)
    for name, value in (("eos_token_ids", frozenset({stop})), ("stop_token_ids", [stop])):
        again = make_scheduler(eos_token_ids=value if name == "eos_token_ids" else ())
        params = {"stop_token_ids": frozenset(value)} if name == "stop_token_ids" else {}
        request = make_request("r", (5, 6), seed=3, max_new_tokens=30, ignore_eos=False, **params)
        ignoring = make_request("i", (5, 6), seed=3, max_new_tokens=30, ignore_eos=True, **params)
        again.add(request)
        again.add(ignoring)
        run(again)
        assert request.output_ids == probe.output_ids[: first + 1]
        assert request.finish_reason == {"type": "stop", "matched": stop}
        assert ignoring.output_ids == probe.output_ids


def test_min_new_tokens_holds_end_tokens_back(make_scheduler, make_request, run):
    scheduler = make_scheduler(eos_token_ids=range(3, 99))
    request = make_request("r", (5,), ignore_eos=False, min_new_tokens=4, max_new_tokens=20)
    scheduler.add(request)
    run(scheduler)
    assert len(request.output_ids) >= 5
    assert set(request.output_ids[:4]) <= {0, 1, 2}


def test_abort_keeps_partial_output_and_frees_the_slot(make_scheduler, make_request, run):
    scheduler = make_scheduler(running=1)
    running, waiting = make_request("a", (5, 6), max_new_tokens=50), make_request("b", (7,), max_new_tokens=3)
    never = make_request("c", (8,), max_new_tokens=3)
    for request in (running, waiting, never):
        scheduler.add(request)
    for _ in range(5):
        scheduler.step()
    gone = scheduler.abort(lambda r: r.rid in ("a", "c"))
    assert {r.rid for r in gone} == {"a", "c"}
    assert running.finish_reason["type"] == "abort"
    assert len(running.output_ids) == len(running.log_probs) == 6
    assert never.output_ids == []
    assert never.version_spans() == []
    assert [r.rid for r in run(scheduler)] == ["b"]
    assert scheduler.idle


def test_new_requests_queue_while_paused(make_scheduler, make_request, run):
    scheduler = make_scheduler()
    scheduler.pause("in_place")
    request = make_request("a", (5,), max_new_tokens=3)
    scheduler.add(request)
    assert not scheduler.has_work
    assert scheduler.step() == []
    assert request.output_ids == []
    scheduler.resume()
    assert run(scheduler) == [request]


def test_pause_with_abort_finishes_everything(make_scheduler, make_request):
    scheduler = make_scheduler(running=1)
    for i in range(3):
        scheduler.add(make_request(str(i), (5,), max_new_tokens=9))
    scheduler.step()
    assert {r.rid for r in scheduler.pause("abort")} == {"0", "1", "2"}
    assert scheduler.idle
    assert scheduler.paused


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_without_new_weights_changes_no_token(mode, make_scheduler, make_request, random_prompt, run):
    prompt = random_prompt(random.Random(0), 60)
    outputs = []
    for pause in (False, True):
        scheduler = make_scheduler()
        for i in range(4):
            scheduler.add(make_request(str(i), prompt, seed=i, max_new_tokens=30))
        for _ in range(8):
            scheduler.step()
        if pause:
            assert scheduler.pause(mode) == []
            scheduler.resume()
        finished = run(scheduler)
        outputs.append({r.rid: r.output_ids for r in finished})
        assert {r.num_retractions for r in finished} == {int(pause and mode == "retract")}
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_tokens_after_an_update_are_of_the_new_weights(
    mode, module, make_scheduler, make_request, run, reference_log_probs
):
    scheduler = make_scheduler(version="4")
    request = make_request("a", (5, 6, 7), seed=1, max_new_tokens=20)
    scheduler.add(request)
    for _ in range(7):
        scheduler.step()
    assert scheduler.running_tokens == 3 + 8
    scheduler.pause(mode)
    assert scheduler.running_tokens == (0 if mode == "retract" else 3 + 8)
    scheduler.decoder.load(module("qwen3", 1))
    scheduler.weights_changed("5")
    scheduler.resume()
    run(scheduler)
    assert request.version_spans() == [
        {"version": "4", "start": 0, "end": 8},
        {"version": "5", "start": 8, "end": 20},
    ]
    old, new = (reference_log_probs(module("qwen3", seed), request, 1.0) for seed in (0, 1))
    assert request.log_probs[:8] == pytest.approx(old[:8], abs=1e-5)
    # Retracted: entries are computed again by the new weights. In place: they stay those of the old ones.
    recomputed = request.log_probs[8:] == pytest.approx(new[8:], abs=1e-5)
    assert recomputed == (mode == "retract")
    assert max(abs(a - b) for a, b in zip(request.log_probs[8:], old[8:], strict=True)) > 0.1


def test_prefixes_of_old_weights_are_forgotten(counted, module, make_request, run):
    scheduler = counted()
    for version in ("0", "1"):
        scheduler.add(make_request(version, (5, 6), max_new_tokens=2))
        run(scheduler)
        scheduler.weights_changed("1")
    assert scheduler.decoder.prefilled == [(5, 6), (5, 6)]


def test_updates_without_tokens_between_them_leave_no_empty_span(make_scheduler, make_request, run):
    scheduler = make_scheduler()
    request = make_request("a", (5,), max_new_tokens=5)
    scheduler.add(request)
    scheduler.step()
    for version in ("1", "2", "2"):
        scheduler.weights_changed(version)
    run(scheduler)
    assert request.version_spans() == [
        {"version": "0", "start": 0, "end": 2},
        {"version": "2", "start": 2, "end": 5},
    ]


def test_flush_is_refused_while_requests_hold_memory(make_scheduler, make_request):
    scheduler = make_scheduler()
    scheduler.add(make_request("a", (5,), max_new_tokens=5))
    assert not scheduler.flush()
    scheduler.step()
    assert not scheduler.flush()
    scheduler.pause("in_place")
    assert not scheduler.flush()
    scheduler.pause("retract")
    assert scheduler.flush()


def test_prefixes_are_evicted_oldest_first_but_never_while_pinned():
    def prefix(length):
        return Prefix(length=length, keys=None, values=None, logits=None)

    cache = PrefixCache(max_tokens=5)
    cache.pin((1, 1, 1))
    cache.put((1, 1, 1), prefix(3))
    cache.put((2, 2, 2), prefix(3))
    cache.put((3, 3), prefix(2))
    assert len(cache) == 3
    cache.put((4,), prefix(1))  # unpinned ones would hold 6 tokens: (2, 2, 2) is the oldest
    assert cache.get((2, 2, 2)) is None
    assert cache.get((1, 1, 1)) is not None
    assert cache.get((3, 3)) is not None
    cache.unpin((1, 1, 1))  # 3 + 2 + 1 tokens: (4,) is the least recently used, and more must go
    assert cache.get((4,)) is None
    assert cache.get((1, 1, 1)) is not None
