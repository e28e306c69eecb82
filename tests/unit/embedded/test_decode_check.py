"""Models outside the functional forward are served with the probabilities of a whole pass, or refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from buffer_rl.embedded.decode_check import UnsupportedModelError, check_decoding, small_copy
from buffer_rl.embedded.fallback import FallbackDecoder
from buffer_rl.embedded.loader import LoadedModel, LoadOptions
from buffer_rl.embedded.scheduler import Scheduler
from buffer_rl.errors import EngineError

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
    "bloom": (lambda: config_of("Bloom"), "'bloom' model.*takes no batch of rows at positions of their own"),
    "falcon with alibi": (
        lambda: transformers.FalconConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
        ),
        "'falcon' model.*as where alibi takes the place",
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
        r"'recurrent_gemma' model.*layers of kind \['linear_attention'\]",
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


@pytest.mark.parametrize("window", [None, 7, 9])
@pytest.mark.parametrize("name", ["mistral", "gemma3 with a vision part"])
def test_a_window_that_is_ignored_or_off_by_one_is_found(name, window):
    def build(module: Any, context_length: int) -> FallbackDecoder:
        decoder = FallbackDecoder(module, context_length, check=False)
        assert decoder.window == 8, "of the copy"
        decoder.window = window
        return decoder

    model = model_of(SERVED[name]())
    with pytest.raises(UnsupportedModelError, match=r"first at position [789]"):
        check_decoding(build, model, 512)


def test_the_cost_of_the_check_does_not_follow_the_size_of_the_model():
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig())
    assert sum(p.numel() for p in model.parameters()) > 40e9
    small = small_copy(model, 131072, torch.float32)
    assert sum(p.numel() for p in small.parameters()) < 5e6
    assert small.config.num_hidden_layers == model.config.num_hidden_layers
    assert model.config.hidden_size == 4096, "the model's own configuration stays as it is"


def test_the_random_numbers_of_the_process_do_not_change():
    model = model_of(config_of("Mistral"))
    before = torch.get_rng_state()
    FallbackDecoder(model, 512)
    assert torch.equal(torch.get_rng_state(), before)


class OfOneSize(transformers.MistralForCausalLM):
    """Cannot be built in another size."""

    def __init__(self, config: Any) -> None:
        if config.max_position_embeddings != 512:
            raise ValueError("512 positions, no fewer")
        super().__init__(config)


def test_a_model_that_has_no_small_copy_is_checked_itself_or_refused():
    def build(**settings: Any) -> Any:
        return OfOneSize(config_of("Mistral", **settings)).eval()

    FallbackDecoder(build(sliding_window=8), 512)
    FallbackDecoder(build(sliding_window=256), 200)
    with pytest.raises(UnsupportedModelError, match=r"512 positions, no fewer.*no short row passes sliding_window 256"):
        FallbackDecoder(build(sliding_window=256), 512)
    with pytest.raises(UnsupportedModelError, match=r"512 positions, no fewer.*bfloat16 is too coarse"):
        FallbackDecoder(build(sliding_window=8).to(torch.bfloat16), 512)


def test_a_folder_of_a_composite_model_is_loaded_with_the_limits_of_its_text_part(tmp_path):
    model_of(gemma3(eos_token_id=7)).save_pretrained(tmp_path)
    loaded = LoadedModel(LoadOptions(model_path=str(tmp_path)))
    assert loaded.decoder.shape.context_length == 512
    assert loaded.decoder.window == 32
    assert 7 in loaded.eos_token_ids


def test_the_error_names_the_folder_and_its_hint_helps(tmp_path):
    model_of(gpt_neo()).save_pretrained(tmp_path)
    with pytest.raises(EngineError) as caught:
        LoadedModel(LoadOptions(model_path=str(tmp_path)))
    assert str(tmp_path) in caught.value.where
    LoadedModel(LoadOptions(model_path=str(tmp_path), context_length=32))  # what the hint proposes
