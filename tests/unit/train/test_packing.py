"""Rows that go through the model as one sequence give what padded rows give, and which models take them so."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from buffer_rl.testing.tiny import ARCHITECTURES, make_tiny_model
from buffer_rl.train.collate import collate
from buffer_rl.train.forward import response_log_probs, response_values
from buffer_rl.train.model import load_model, with_value_head
from buffer_rl.train.packing import attention, is_packed, pack_where_possible, packing_of
from buffer_rl.types import TrainBatch

CPU = torch.device("cpu")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz="


def test_which_architectures_take_packed_rows(tmp_path: Path) -> None:
    """The others attend within windows."""
    packed = {
        name: is_packed(load_model(make_tiny_model(tmp_path / name, architecture=name), CPU, "--hf-checkpoint"))
        for name in ARCHITECTURES
    }
    assert {name for name, found in packed.items() if not found} == {"gemma3"}, packed


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_log_probs_values_and_gradients_of_packed_rows_equal_those_of_padded_ones(
    architecture: str, tmp_path: Path, make_batch: Callable[..., TrainBatch]
) -> None:
    folder = make_tiny_model(tmp_path, architecture=architecture, characters=CHARACTERS)
    packed = load_model(folder, CPU, "--hf-checkpoint")
    padded = copy.deepcopy(packed)
    padded.set_attn_implementation("sdpa")
    assert (is_packed(packed), is_packed(padded)) == (True, False)
    batch = make_batch(6)
    assert len(set(batch.lengths)) > 1
    micro = collate(batch, CPU)
    for model in (packed, padded):
        log_probs_bt, entropy_bt = response_log_probs(model, micro, 0.7)
        (log_probs_bt.square().sum() + entropy_bt.sum()).backward()
    found, expected = (response_log_probs(model, micro, 0.7) for model in (packed, padded))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for (name, left), right in zip(packed.named_parameters(), padded.parameters(), strict=True):
        assert left.grad is not None
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-5, atol=1e-6, msg=name)
    for model in (packed, padded):
        with_value_head(model)
        torch.nn.init.normal_(model.get_output_embeddings().weight, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(response_values(packed, micro), response_values(padded, micro), rtol=1e-6, atol=1e-6)


def test_recomputed_activations_are_those_of_the_same_rows(
    model_path: str, make_batch: Callable[..., TrainBatch]
) -> None:
    model = load_model(model_path, CPU, "--hf-checkpoint")
    micro = collate(make_batch(6), CPU)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        response_log_probs(model, micro, 1.0)[0].square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        model.activation_checkpointing_enable()
        model.train()  # recomputes in this mode alone; the model has no dropout
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


def test_attention_sees_its_own_row_alone() -> None:
    lengths = (3, 1, 4)
    packing = packing_of(lengths, CPU)
    assert packing.tokens.tolist() == [0, 1, 2, 4, 8, 9, 10, 11]
    assert packing.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, sum(lengths), 4) for _ in range(3))
    found, _ = attention(torch.nn.Module(), query, key, value, None, packing)
    start = 0
    for length in lengths:
        own = [states[0, :, start : start + length] for states in (query, key, value)]
        scores = own[0] @ own[1].transpose(-1, -2) / 2.0  # the root of head_dim
        weights = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")).softmax(-1)
        torch.testing.assert_close(found[0, start : start + length], (weights @ own[2]).transpose(0, 1))
        start += length


def test_a_model_whose_rows_would_see_each_other_stays_padded(model_path: str) -> None:
    class Leaking(torch.nn.Module):
        """Adds to each token what stands before it, over the border of packed rows."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(states)
            return out + out.cumsum(1)

    model = load_model(model_path, CPU, "--hf-checkpoint")
    model.set_attn_implementation("sdpa")
    model.model.layers[0].mlp = Leaking(model.model.layers[0].mlp)
    pack_where_possible(model)
    assert not is_packed(model)


def test_a_written_model_does_not_name_the_packed_attention(model_path: str, tmp_path: Path) -> None:
    load_model(model_path, CPU, "--hf-checkpoint").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not [name for name, value in config.items() if "sdpa" in str(value)]
