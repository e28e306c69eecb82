"""What the engine draws and reports, against plain transformers."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from buffer_rl.embedded.fallback import FallbackDecoder, UnsupportedModelError
from buffer_rl.embedded.fast_decoder import MANY_ROWS, MAX_PREFILL_TOKENS, SHORT_WIDTH, FastDecoder
from buffer_rl.embedded.scheduler import Scheduler

ARCHITECTURES = ("qwen3", "qwen2", "llama", "gpt_neox", "gemma3")
PROMPT_LENGTHS = (1, 5, 17, 60, 63, 64, 65, 130)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_equal_those_of_one_full_forward_pass(
    architecture, deterministic, module, make_scheduler, make_request, random_prompt, run, reference_log_probs
):
    rng = random.Random(1)
    scheduler = make_scheduler(architecture, deterministic=deterministic, running=5)
    for i, length in enumerate(PROMPT_LENGTHS):
        request = make_request(str(i), random_prompt(rng, length), seed=i, temperature=0.7, max_new_tokens=70)
        scheduler.add(request)
    finished = run(scheduler)
    assert len(finished) == len(PROMPT_LENGTHS)
    for request in finished:
        expected = reference_log_probs(module(architecture), request, 0.7)
        assert request.log_probs == pytest.approx(expected, abs=5e-5)


def test_log_probs_of_rows_that_are_many_equal_those_of_one_full_forward_pass(
    module, make_scheduler, make_request, random_prompt, run, reference_log_probs
):
    rng = random.Random(7)
    prompts = [random_prompt(rng, length) for length in PROMPT_LENGTHS]
    scheduler = make_scheduler(running=8 * len(prompts))
    for i, prompt in enumerate(prompts * 8):
        scheduler.add(make_request(str(i), prompt, seed=i, temperature=0.7, max_new_tokens=12))
    scheduler.step()
    assert any(len(pool.rows) >= MANY_ROWS and pool.capacity <= SHORT_WIDTH for pool in scheduler.cache.pools())
    for request in run(scheduler):
        assert request.log_probs == pytest.approx(reference_log_probs(module(), request, 0.7), abs=5e-5)


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_scaled_rotary_frequencies_are_those_of_transformers(
    rope_type, module, make_request, random_prompt, run, reference_log_probs
):
    config = copy.deepcopy(module("llama").config)
    of_llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    limit = {} if rope_type == "linear" else {"original_max_position_embeddings": 32}
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": rope_type, "factor": 4.0, **limit, **of_llama3}
    model = type(module("llama"))(config).eval()
    model.load_state_dict(module("llama").state_dict())
    request = make_request("r", random_prompt(random.Random(2), 50), temperature=0.7, max_new_tokens=30)
    scheduler = Scheduler(FastDecoder(model, 512), max_running_requests=1)
    scheduler.add(request)
    run(scheduler)
    assert request.log_probs == pytest.approx(reference_log_probs(model, request, 0.7), abs=5e-5)
    unscaled = reference_log_probs(module("llama"), request, 0.7)
    assert request.log_probs != pytest.approx(unscaled, abs=1e-3)


def test_prompts_that_are_computed_together_are_few_with_their_padding(module):
    class Noting(FastDecoder):
        def _prefill_batch(self, sequences):
            batches.append([len(sequence) for sequence in sequences])
            return super()._prefill_batch(sequences)

    batches: list[list[int]] = []
    lengths = [5] * 30 + [400] * 20 + [5] * 10
    found = Noting(module(), 512).prefill([[3 + i % 40] * length for i, length in enumerate(lengths)])
    assert [prefix.length for prefix in found] == lengths
    assert len(batches) == 2
    assert all(len(batch) * max(batch) <= MAX_PREFILL_TOKENS for batch in batches)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_decoding_equals_generate_token_for_token(
    architecture, module, make_scheduler, make_request, random_prompt, run
):
    rng = random.Random(2)
    scheduler = make_scheduler(architecture)
    for i, length in enumerate((3, 20, 61)):
        scheduler.add(make_request(str(i), random_prompt(rng, length), temperature=0.0, max_new_tokens=40))
    for request in run(scheduler):
        out = module(architecture).generate(
            torch.tensor([request.prompt_ids]), do_sample=False, max_new_tokens=40, min_new_tokens=40, eos_token_id=None
        )
        assert request.output_ids == out[0, len(request.prompt_ids) :].tolist()


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_both_decoders_draw_the_same_tokens(architecture, make_scheduler, make_request, random_prompt, run):
    prompt = random_prompt(random.Random(3), 30)
    outputs = []
    for fallback in (False, True):
        scheduler = make_scheduler(architecture, fallback=fallback)
        for i in range(4):
            scheduler.add(make_request(str(i), prompt, seed=i, max_new_tokens=60))
        outputs.append({request.rid: request.output_ids for request in run(scheduler)})
    assert outputs[0] == outputs[1]


def test_settings_outside_the_functional_forward_go_to_the_fallback(module):
    config = module("qwen3").config
    assert FastDecoder.supports(config)
    for name, value in {
        "model_type": "mistral",
        "hidden_act": "gelu",
        "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    }.items():
        changed = type(config)(**config.to_dict())
        setattr(changed, name, value)
        assert not FastDecoder.supports(changed), name


def test_a_model_without_key_value_cache_is_refused():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(UnsupportedModelError):
        FallbackDecoder(MambaForCausalLM(config).eval(), 64)


def test_new_weights_are_used_after_load(module):
    first, second = module("qwen3", 0), module("qwen3", 1)
    decoder = FastDecoder(first, 512)
    before = decoder.prefill([[5, 6, 7]])[0].logits
    decoder.load(second)
    after = decoder.prefill([[5, 6, 7]])[0].logits
    with torch.no_grad():
        expected = second(torch.tensor([[5, 6, 7]])).logits[0, -1]
    torch.testing.assert_close(after[: decoder.vocab_size], expected, atol=5e-5, rtol=0)
    assert (before - after)[: decoder.vocab_size].abs().max() > 0.1


def test_padding_of_the_vocabulary_can_never_be_drawn(module):
    decoder = FastDecoder(module("qwen3"), 512)
    logits = decoder.prefill([[5, 6, 7]])[0].logits
    assert logits.shape == (128,)
    assert decoder.vocab_size == 99
    assert torch.isneginf(logits[99:]).all()
    assert torch.isfinite(logits[:99]).all()
