"""Lengths beyond which a batch's rows depend on each other, read from configurations of all forms."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.files.hf_config import length_problem, max_positions

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONG = {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0], "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def config(**more: Any) -> dict[str, Any]:
    return {"model_type": "llama", "max_position_embeddings": 256, **more}


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        (config(rope_scaling={"type": "dynamic", "factor": 2.0}), 256),
        (config(rope_parameters={**DYNAMIC, "original_max_position_embeddings": 64}), 64),
        (config(rope_scaling={"type": "longrope"}, original_max_position_embeddings=32), 32),
        (config(rope_scaling={"type": "su"}, original_max_position_embeddings=32), 32),
        (config(model_type="phi3", rope_scaling={"type": "yarn"}, original_max_position_embeddings=32), 32),
        (config(rope_parameters=LONG), 64),
        (config(rope_parameters={"full_attention": LONG, "sliding_attention": PLAIN}), 64),
        (config(rope_parameters={"full_attention": DYNAMIC, "sliding_attention": LONG}), 64),
        ({"model_type": "gemma3", "text_config": config(rope_parameters=LONG)}, 64),
        (config(index_topk=128), 128),
        (config(index_topk=128, layer_types=["indexed_attention"]), 128),
    ],
)
def test_sequences_up_to_the_limit_are_fine_and_longer_ones_are_not(settings, limit):
    assert length_problem(settings, limit) is None
    for longest in (limit + 1, None):
        problem = length_problem(settings, longest)
        assert problem is not None
        assert problem[1] == limit
        assert f"beyond {limit} tokens" in problem[0]


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "proportional"])
def test_other_kinds_of_rope_have_no_such_limit(kind):
    scaling = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 16}
    assert length_problem(config(rope_parameters=scaling), None) is None
    assert length_problem(config(rope_scaling=None), None) is None
    assert length_problem(config(index_topk=8, layer_types=["compressed_sparse_attention"]), None) is None


def test_the_longest_sequence_is_that_of_the_text_part():
    assert max_positions(config()) == 256
    assert max_positions({"model_type": "gemma3", "text_config": config()}) == 256
    assert max_positions({"model_type": "gpt2", "n_positions": 1024}) == 1024
    assert max_positions({"model_type": "bloom"}) is None
