"""Models outside the functional forward are served with the probabilities of a whole pass, or refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from buffer_rl.engine.embedded.decode_check import UnsupportedModelError
from buffer_rl.engine.embedded.fallback import FallbackDecoder
from buffer_rl.engine.embedded.scheduler import Scheduler

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {**ROPE, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 8.0, 16.0]}


def config_of(name: str, **settings: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**{**SIZES, **settings})


def gemma3(**settings: Any) -> Any:
    text = config_of("Gemma3Text", query_pre_attn_scalar=8, **{**TWO_KINDS, **settings})
    vision = {**VISION, "image_size": 28, "patch_size": 14}
    return transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)


def gpt_neo(**settings: Any) -> Any:
    types = [[["global", "local"], 1]]
    names = {"num_layers": 2, "num_heads": 4, "attention_types": types, "window_size": 32, **settings}
    return transformers.GPTNeoConfig(vocab_size=100, hidden_size=32, max_position_embeddings=512, **names)


def model_of(config: Any) -> Any:
    """A random model whose attention matters: with the usual small weights, all tokens have about one probability."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.2)
    return model


SERVED = {
    "gemma3 with a vision part": gemma3,
    "mistral": lambda: config_of("Mistral", sliding_window=32),
    "mixtral": lambda: config_of("Mixtral", num_local_experts=4),
    "qwen3_moe": lambda: config_of("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "cohere2": lambda: config_of("Cohere2", **TWO_KINDS),
    "gpt_oss": lambda: config_of("GptOss", num_local_experts=4, **TWO_KINDS),
    "phi3 within its rope limit": lambda: config_of(
        "Phi3", max_position_embeddings=1024, original_max_position_embeddings=512, rope_parameters=dict(LONGROPE)
    ),
    "mistral with yarn": lambda: config_of("Mistral", rope_parameters={**ROPE, "rope_type": "yarn"}),
    "dynamic within its rope limit": lambda: config_of(
        "Llama", rope_parameters={**ROPE, "rope_type": "dynamic"} | {"original_max_position_embeddings": 512}
    ),
    "gpt_neo within its window": lambda: gpt_neo(window_size=512),
}


@pytest.mark.parametrize("name", SERVED)
def test_log_probs_of_a_served_model_equal_those_of_one_full_forward_pass(
    name, make_request, random_prompt, run, reference_log_probs
):
    model = model_of(SERVED[name]())
    scheduler = Scheduler(FallbackDecoder(model, 512), max_running_requests=3)
    rng = random.Random(1)
    for i, length in enumerate((1, 30, 33, 62)):  # across the window, and across the smallest pool of slots
        scheduler.add(make_request(str(i), random_prompt(rng, length), seed=i, max_new_tokens=8))
    for request in run(scheduler):
        assert request.log_probs == pytest.approx(reference_log_probs(model, request, 1.0), abs=1e-4)


REFUSED = {
    "gpt_neo": (gpt_neo, r"'gpt_neo' model.*differs from one pass.* \d[\d.e+]* nats, first at position \d+"),
    "bloom": (lambda: config_of("Bloom"), "'bloom' model.*cannot decode rows of different lengths"),
    "falcon with alibi": (
        lambda: transformers.FalconConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
        ),
        "'falcon' model.*",
    ),
    "mamba": (lambda: config_of("Mamba", state_size=4), r"'mamba' model.*layers of kind \['linear_attention'\]"),
    "jamba": (
        lambda: config_of("Jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, use_mamba_kernels=False),
        r"'jamba' model.*layers of kind \['linear_attention'\]",
    ),
    "qwen3_next": (
        lambda: config_of("Qwen3Next", layer_types=["linear_attention", "full_attention"], num_experts=4),
        r"'qwen3_next' model.*layers of kind \['linear_attention'\]",
    ),
    "recurrent_gemma": (
        lambda: config_of("RecurrentGemma", block_types=["recurrent", "attention"], lru_width=32),
        "'recurrent_gemma' model.*",
    ),
    "bert, which looks ahead": (lambda: config_of("Bert"), "'bert' model.*differs from one pass"),
    "longrope": (
        lambda: config_of("Phi3", original_max_position_embeddings=32, rope_parameters=LONGROPE),
        r"'longrope' rope scaling.*beyond 32 tokens",
    ),
    "dynamic": (
        lambda: config_of("Llama", rope_parameters={**ROPE, "rope_type": "dynamic"}),
        r"'dynamic' rope scaling.*beyond 32 tokens",
    ),
    "dynamic in a part": (
        lambda: gemma3(
            rope_parameters={
                "full_attention": {**ROPE, "rope_type": "dynamic"},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        ),
        r"'gemma3' model.*'dynamic' rope scaling.*beyond 32 tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_decoded_is_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message):
        FallbackDecoder(model_of(make()), 512)
