"""Under ``deterministic`` a request's answer is a function of the request alone, to the last bit."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.scheduler import Scheduler
from buffer_rl.testing.tiny import make_tiny_model


def answer_of(request):
    return (tuple(request.output_ids), tuple(request.log_probs), request.finish_reason["type"])


def requests_of(rng, make_request, random_prompt, count):
    """Groups of equal prompts and single ones, of many lengths, with many settings."""
    made = []
    while len(made) < count:
        prompt = random_prompt(rng, rng.choice([1, 7, 30, 62, 63, 64, 65, 100]))
        for _ in range(rng.choice([1, 1, 4])):
            params = {
                "max_new_tokens": rng.choice([1, 2, 9, 40, 70]),
                "temperature": rng.choice([0.0, 0.7, 1.0]),
                "top_p": rng.choice([1.0, 0.9]),
            }
            i = len(made)
            made.append(lambda i=i, prompt=prompt, params=params: make_request(str(i), prompt, seed=i, **params))
    return made[:count]


@pytest.mark.parametrize(
    ("architecture", "fallback", "patterns"),
    [
        pytest.param("qwen3", False, 12, marks=pytest.mark.slow),
        ("qwen3", False, 3),
        ("llama", False, 3),
        ("qwen2", False, 3),
        ("qwen3", True, 2),
        pytest.param("gemma3", True, 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", True, 2, marks=pytest.mark.slow),
    ],
)
def test_answers_do_not_depend_on_who_shares_the_batch_or_on_arrival(
    architecture, fallback, patterns, make_scheduler, make_request, random_prompt, run
):
    rng = random.Random(5)
    makers = requests_of(rng, make_request, random_prompt, 24)
    alone = {}
    for make in makers:
        scheduler = make_scheduler(architecture, deterministic=True, fallback=fallback)
        scheduler.add(make())
        for request in run(scheduler):
            alone[request.rid] = answer_of(request)
    for _ in range(patterns):
        scheduler = make_scheduler(
            architecture, deterministic=True, fallback=fallback, running=rng.choice([1, 3, 17, 24])
        )
        order = rng.sample(makers, len(makers))
        finished = []
        while order or scheduler.has_work:
            for _ in range(rng.choice([0, 0, 0, 1, 2, 9])):
                if order:
                    scheduler.add(order.pop()())
            finished += scheduler.step()
        assert {request.rid: answer_of(request) for request in finished} == alone


def test_a_neighbour_that_is_aborted_changes_nothing(make_scheduler, make_request, random_prompt, run):
    rng = random.Random(6)
    prompts = [random_prompt(rng, length) for length in (5, 40, 63, 64)]
    answers = []
    for abort in (False, True):
        scheduler = make_scheduler(deterministic=True)
        for i, prompt in enumerate(prompts):
            scheduler.add(make_request(str(i), prompt, seed=i, max_new_tokens=50))
        for _ in range(10):
            scheduler.step()
        if abort:
            scheduler.abort(lambda r: r.rid in ("0", "2"))
        answers.append({r.rid: answer_of(r) for r in run(scheduler) if r.rid in ("1", "3")})
    assert answers[0] == answers[1]


def test_a_seed_repeats_its_answer_without_deterministic_mode_too(make_scheduler, make_request, random_prompt, run):
    prompt = random_prompt(random.Random(7), 20)
    outputs = []
    for running in (1, 8):
        scheduler = make_scheduler(running=running)
        for i in range(8):
            scheduler.add(make_request(str(i), prompt, seed=100 + i % 4, max_new_tokens=30))
        outputs.append({r.rid: r.output_ids for r in run(scheduler)})
    assert outputs[0] == outputs[1]
    for i in range(4):
        assert outputs[0][str(i)] == outputs[0][str(i + 4)]
    assert len({tuple(ids) for ids in outputs[0].values()}) == 4


def test_answers_from_a_vocabulary_of_few_tokens_do_not_depend_on_the_place_in_the_batch(tmp_path, make_request, run):
    """A product of matrices with as many columns as tokens would: its rows are not computed alike."""
    folder = make_tiny_model(tmp_path / "model", characters="abc=0123", init_scale=0.3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.vocab_size == 11
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(11) for _ in range(rng.randrange(2, 9))) for _ in range(20)]
    answers = []
    for order in ([range(20)], [[i] for i in range(20)], [range(19, -1, -1)]):
        scheduler = Scheduler(FastDecoder(model, 64, deterministic=True), max_running_requests=20)
        found = {}
        for together in order:
            for i in together:
                scheduler.add(make_request(str(i), prompts[i], seed=i, max_new_tokens=20))
            found |= {request.rid: answer_of(request) for request in run(scheduler)}
        answers.append(found)
    assert answers[0] == answers[1] == answers[2]
