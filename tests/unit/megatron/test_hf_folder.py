"""Hugging Face folders that are written from a stream of weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl_megatron.bridge import write_folder


@pytest.mark.parametrize(("shard_bytes", "several"), [(1 << 40, False), (40_000, True)])
def test_shards_hold_all_weights_and_load(tmp_path: Path, shard_bytes: int, several: bool) -> None:
    origin = make_tiny_model(tmp_path / "origin", "qwen3", tie_word_embeddings=False)
    weights = load_file(tmp_path / "origin" / "model.safetensors")
    asked: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            asked.append(name)
            yield name, tensor

    target = tmp_path / "target"
    write_folder(stream(), origin, str(target), shard_bytes=shard_bytes)
    parts = sorted(target.glob("*.safetensors"))
    assert (len(parts) > 1) == several
    assert all(sum(t.numel() * t.element_size() for t in load_file(part).values()) <= shard_bytes for part in parts)
    found = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    assert found.keys() == weights.keys() == set(asked)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    if several:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in weights.values())
        assert {name: load_file(target / file)[name].shape for name, file in index["weight_map"].items()} == {
            name: tensor.shape for name, tensor in weights.items()
        }
    model = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


def test_a_rank_that_does_not_write_iterates_and_leaves_nothing(tmp_path: Path) -> None:
    asked: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        asked.append("weight")
        yield "weight", torch.zeros(1)

    write_folder(stream(), str(tmp_path), str(tmp_path / "target"), writes=False)
    assert asked == ["weight"]
    assert not (tmp_path / "target").exists()
