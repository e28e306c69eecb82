"""Weights and logits of Megatron's models beside those of transformers, on gloo ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.testing.tiny import make_tiny_model
from harness import megatron_models
from harness.megatron_ranks import HAS_MEGATRON, REASON, Layout, RankError, RankPool

pytestmark = [pytest.mark.skipif(not HAS_MEGATRON, reason=REASON), pytest.mark.timeout(300)]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "num_hidden_layers": 4}),
    "tied qwen3": ("qwen3", {"num_hidden_layers": 4}),
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "tied qwen3_moe": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3_moe, probabilities of the chosen": ("qwen3_moe", {"norm_topk_prob": True}),
}
LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2 sp": Layout(tp=2, sp=True),
    "pp2": Layout(pp=2),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "ep2": Layout(ep=2),
}
CASES = [
    (model, layout)
    for model, (architecture, overrides) in MODELS.items()
    for layout, sizes in LAYOUTS.items()
    if (sizes.ep == 1 or architecture == "qwen3_moe")
    and (sizes.vpp is None or "num_hidden_layers" in overrides)
    and (sizes.tp == 1 or sizes.sp or architecture != "qwen3_moe")  # which Megatron refuses
]
BOUND = 5e-6
"""Largest difference of float32 logits: sums over tensor ranks, over experts, and in matrix products of other shapes
than those of transformers have another order."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``folder(model)``: a model of ``MODELS`` with 99 tokens, which neither 2 nor 4 divides."""

    @cache
    def made(model: str) -> str:
        architecture, overrides = MODELS[model]
        return make_tiny_model(tmp_path_factory.mktemp("models") / model, architecture, **overrides)

    return made


def tokens() -> np.ndarray:
    """Two rows of 40 tokens: further apart than the 16 at which the Llama's frequencies are scaled."""
    return np.random.default_rng(0).integers(3, 99, (2, 40))


def reference(folder: str) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(tokens())).logits.numpy()
    return found


def differences(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference of logits, those of tokens that only pad the vocabulary left out."""
    return float(np.abs(found[..., : expected.shape[-1]] - expected).max())


def check_round_trip(found: list[dict[str, Any]]) -> None:
    for answer in found:
        assert answer["differing"] == answer["missing"] == answer["repeated"] == []


@pytest.mark.slow
def test_a_folder_goes_through_megatron_and_back_bit_by_bit(ranks: RankPool, folder: Any) -> None:
    for model in ("tied qwen3", "qwen3_moe"):
        check_round_trip(ranks.run(1, megatron_models.round_trip, Layout(), folder(model)))


@pytest.mark.slow
def test_logits_are_those_of_transformers(ranks: RankPool, folder: Any) -> None:
    for model in ("tied qwen3", "llama", "qwen3_moe"):
        (found,) = ranks.run(1, megatron_models.logits, Layout(), folder(model), tokens())
        assert differences(found, reference(folder(model))) <= BOUND, model


@pytest.mark.megatron
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_sharded_round_trips_are_bit_equal(ranks: RankPool, folder: Any, model: str, layout: str) -> None:
    found = ranks.run(2, megatron_models.round_trip, LAYOUTS[layout], folder(model))
    check_round_trip(found)
    assert all(answer["own"] < 0.8 * answer["whole"] for answer in found), "a rank has the whole model"
    assert all(answer["most"] < 0.2 * answer["whole"] for answer in found), "an export gathers the whole model"


@pytest.mark.megatron
@pytest.mark.parametrize("model", ["qwen3", "tied qwen3", "qwen3_moe"])
def test_a_padded_vocabulary_is_cut_again(ranks: RankPool, folder: Any, model: str) -> None:
    for world, layout in ((1, Layout()), (2, Layout(tp=2, sp=True))):
        changes = {"make_vocab_size_divisible_by": 8}
        found = ranks.run(world, megatron_models.round_trip, layout, folder(model), changes)
        check_round_trip(found)
        padded = 104 if world == 1 else 112
        assert found[0]["padded"] == (99, padded)
        (logits, *_) = ranks.run(world, megatron_models.logits, layout, folder(model), tokens(), "", changes)
        assert logits.shape[-1] == padded
        # The tokens that pad it take no part in the softmax.
        expected = torch.from_numpy(reference(folder(model))).log_softmax(-1)
        assert differences(torch.from_numpy(logits).log_softmax(-1).numpy(), expected.numpy()) <= 2 * BOUND


@pytest.mark.megatron
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_halves_come_back_as_the_folder_rounded(ranks: RankPool, folder: Any, layout: str) -> None:
    changes = {"dtype": torch.bfloat16}
    check_round_trip(ranks.run(2, megatron_models.round_trip, LAYOUTS[layout], folder("tied qwen3"), changes))


@pytest.mark.megatron
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_sharded_logits_are_those_of_transformers(ranks: RankPool, folder: Any, model: str, layout: str) -> None:
    found = ranks.run(2, megatron_models.logits, LAYOUTS[layout], folder(model), tokens())
    expected = reference(folder(model))
    answers = [answer for answer in found if answer is not None]
    assert answers
    for answer in answers:
        assert differences(answer, expected) <= BOUND


@pytest.mark.megatron
@pytest.mark.parametrize(("control", "least"), [("unloaded", 1.0), ("non-causal", 0.5), ("q_norm", 1e-5)])
def test_the_comparison_of_logits_finds_faults(ranks: RankPool, folder: Any, control: str, least: float) -> None:
    (found,) = ranks.run(1, megatron_models.logits, Layout(), folder("qwen3"), tokens(), control)
    assert differences(found, reference(folder("qwen3"))) > least


@pytest.mark.megatron
def test_experts_with_tensor_parallelism_need_sequence_parallelism(ranks: RankPool, folder: Any) -> None:
    with pytest.raises(RankError, match="add --sequence-parallel"):
        ranks.run(2, megatron_models.round_trip, Layout(tp=2), folder("qwen3_moe"))


@pytest.mark.megatron
@pytest.mark.parametrize("layout", ["one rank", "tp2", "tp2 sp", "pp2"])
@pytest.mark.parametrize("model", ["tied qwen3", "llama"])
def test_a_value_head_stands_in_for_the_output_layer(ranks: RankPool, folder: Any, model: str, layout: str) -> None:
    from transformers import AutoModelForCausalLM

    weight = np.random.default_rng(1).normal(size=64).astype(np.float32)
    plain = AutoModelForCausalLM.from_pretrained(folder(model), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        hidden = plain.model(torch.from_numpy(tokens())).last_hidden_state
    sizes = LAYOUTS.get(layout, Layout())
    found = ranks.run(sizes.tp * sizes.pp, megatron_models.values, sizes, folder(model), tokens(), weight)
    answers = [answer for answer in found if answer is not None]
    assert len(answers) == sizes.tp
    for answer in answers:
        assert np.allclose(answer["values"], (hidden @ torch.from_numpy(weight)).numpy(), atol=5e-5)  # up to 16
        # of the sum of all values: the sum of what the head sees
        assert np.allclose(answer["gradient"], hidden.sum((0, 1)).numpy(), atol=1e-4)
        assert "lm_head.weight" not in answer["names"]
        assert "model.norm.weight" in answer["names"]
