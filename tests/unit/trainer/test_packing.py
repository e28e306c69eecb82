"""Rows that go through the model as one sequence give what padded rows give, and which models take them so."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DogeConfig, DogeForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from buffer_rl.kinds.marks import Unit
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from buffer_rl.testing.tiny import ARCHITECTURES, make_tiny_model
from buffer_rl.trainer.collate import collate, row_blocks
from buffer_rl.trainer.forward import response_log_probs, response_values
from buffer_rl.trainer.model import Model
from buffer_rl.trainer.packing import SHORT_ROW, attention, is_packed, pack, pack_where_possible
from buffer_rl.trainer.pretrained import load_model

CPU = torch.device("cpu")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz="


def test_which_architectures_take_packed_rows(tmp_path: Path) -> None:
    """The others attend within windows."""
    packed = {
        name: is_packed(load_model(make_tiny_model(tmp_path / name, architecture=name), CPU, "--hf-checkpoint"))
        for name in ARCHITECTURES
    }
    assert {name for name, found in packed.items() if not found} == {"gemma3"}, packed


def grouped(num_groups: int, num_samples: int, seed: int = 0) -> TrainBatch:
    """Groups of rows with one prompt of 1 to 6 tokens, and responses of 0 to 19."""
    rng = np.random.default_rng(seed)
    row_ids, tokens, lengths = [], [], []
    for group in range(num_groups):
        prompt = rng.integers(3, 20, rng.integers(1, 7))
        for sample in range(num_samples):
            row_ids.append(RowId(GroupUid("set", group, 0), sample, 0))
            lengths.append(int(rng.integers(0, 20)))
            tokens.append(np.concatenate([prompt, rng.integers(3, 20, lengths[-1])]).astype(np.int32))
    columns = {"tokens": tokens, "response_length": np.array(lengths, dtype=np.int32)}
    return TrainBatch(rollout_id=0, task="train_0", row_ids=row_ids, columns=columns)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_log_probs_values_and_gradients_of_packed_rows_equal_those_of_padded_ones(
    architecture: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, architecture=architecture, characters=CHARACTERS)
    packed = load_model(folder, CPU, "--hf-checkpoint")
    padded = copy.deepcopy(packed)
    padded.set_attn_implementation("sdpa")
    assert (is_packed(packed), is_packed(padded)) == (True, False)
    batch = grouped(3, 5)
    micro = collate(batch, CPU, packed=True)
    assert micro.packing is not None
    assert len(micro.packing.blocks) > 1
    for model in (packed, padded):
        log_probs_bt, entropy_bt = response_log_probs(model, micro, 0.7)
        (log_probs_bt.square().sum() + entropy_bt.sum()).backward()
    found, expected = (response_log_probs(model, micro, 0.7) for model in (packed, padded))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for (name, left), right in zip(packed.named_parameters(), padded.parameters(), strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert (left.grad - right.grad).abs().max() <= 1e-5 * right.grad.abs().max(), name
    for model in (packed, padded):
        Model(model).add_value_head()
        torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.1, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(response_values(packed, micro), response_values(padded, micro), rtol=1e-5, atol=1e-5)


def test_recomputed_activations_are_those_of_the_same_rows(model_path: str) -> None:
    model = load_model(model_path, CPU, "--hf-checkpoint")
    micro = collate(grouped(2, 3), CPU, packed=True)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        response_log_probs(model, micro, 1.0)[0].square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        model.activation_checkpointing_enable()
        model.train()  # recomputes in this mode alone; the model has no dropout
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


def test_a_prompt_that_rows_have_in_common_is_there_once_and_the_last_token_of_a_response_not_at_all() -> None:
    rows = [np.array(row) for row in ([7, 8, 1, 6], [9], [7, 8, 2, 3, 6], [7, 9, 4, 5, 6])]
    packing = pack(rows, np.array([2, 1, 2, 2]), CPU)
    assert packing.token_m.tolist() == [7, 8, 1, 9, 2, 3, 7, 9, 4, 5]
    assert packing.position_m.tolist() == [0, 1, 2, 0, 2, 3, 0, 1, 2, 3]
    # The token before each of 1, 6; 2, 3, 6; 4, 5, 6.
    assert packing.predictor_n.tolist() == [1, 2, 1, 4, 5, 7, 8, 9]
    assert packing.own_bl.sum(-1).tolist() == [3, 1, 2, 4]
    longest, alone = packing.blocks
    assert (longest.num_rows, longest.max_length, alone.num_rows, alone.max_length) == (3, 4, 1, 1)
    assert longest.tokens.reshape(3, 4)[0].tolist() == [0, 1, 4, 5]  # of [7, 8, 2, 3]
    assert longest.tokens.reshape(3, 4)[2, :3].tolist() == [0, 1, 2]  # of [7, 8, 1]
    assert alone.tokens.tolist() == [3]
    outputs = torch.cat([block.tokens for block in packing.blocks])
    assert outputs[packing.output_m].tolist() == list(range(10))


@pytest.mark.parametrize("num_more", [0, SHORT_ROW])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_sees_its_own_row_alone_and_the_prompt_before_it(num_more: int, scaling: float | None) -> None:
    rows = [np.array(row) for row in ([7, 8, 1, 6], [9], [7, 8, 2, 3, *[4] * num_more, 6])]
    packing = pack(rows, np.array([2, 1, 2]), CPU)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(packing.token_m), 4) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    found, _ = attention(module, query, key, value, None, packing, scaling=scaling)
    key, value = (states.repeat_interleave(2, 1) for states in (key, value))
    for own in ([0, 1, 2], [3], [0, 1, *range(4, 6 + num_more)]):  # packed tokens of each row
        states = [packed[0, :, own] for packed in (query, key, value)]
        scores = states[0] @ states[1].transpose(-1, -2) * (scaling or 0.5)  # one by the root of head_dim
        weights = scores.masked_fill(torch.ones(len(own), len(own)).triu(1).bool(), float("-inf")).softmax(-1)
        torch.testing.assert_close(found[0, own], (weights @ states[2]).transpose(0, 1))


@pytest.mark.parametrize("unit", list(Unit))
@pytest.mark.parametrize("deterministic", [False, True])
def test_micro_batches_of_packed_rows_hold_every_row_once_within_the_limit(unit: Unit, deterministic: bool) -> None:
    batch = grouped(6, 8)
    args = SimpleNamespace(max_tokens_per_gpu=60, deterministic=deterministic)
    blocks = row_blocks(args, batch, unit, packed=True)
    assert sorted(row for block in blocks for row in block) == list(range(len(batch)))
    for block in blocks:
        packing = collate(batch.select(block), CPU, packed=True).packing
        assert packing is not None
        groups = {batch.row_ids[row].uid for row in block}
        assert len(packing.token_m) <= 60 or (unit is Unit.GROUP and len(groups) == 1)
        assert len(groups) == 1 or not deterministic
    holders = [[index for index, block in enumerate(blocks) if row in block] for row in range(len(batch))]
    for start in range(0, len(batch), 8):  # rows of a prompt are in consecutive micro-batches
        found = {index for row in range(start, start + 8) for index in holders[row]}
        assert len(found) == 1 if unit is Unit.GROUP else found == set(range(min(found), max(found) + 1))
    if unit is Unit.ROW and not deterministic:
        assert len(blocks) < len(row_blocks(args, batch, unit))  # padded rows


def test_a_micro_batch_has_few_places_of_attention_and_of_padded_responses_for_its_tokens() -> None:
    rng = np.random.default_rng(0)
    tokens, lengths = [], []
    for group in range(4):  # a long prompt with short responses, and once a long response
        prompt = rng.integers(3, 20, 90)
        for sample in range(16):
            lengths.append(300 if (group, sample) == (2, 7) else 2)
            tokens.append(np.concatenate([prompt, rng.integers(3, 20, lengths[-1])]).astype(np.int32))
    row_ids = [RowId(GroupUid("set", row // 16, 0), row % 16, 0) for row in range(64)]
    columns = {"tokens": tokens, "response_length": np.array(lengths, dtype=np.int32)}
    batch = TrainBatch(rollout_id=0, task="train_0", row_ids=row_ids, columns=columns)
    blocks = row_blocks(SimpleNamespace(max_tokens_per_gpu=400, deterministic=False), batch, packed=True)
    assert sorted(row for block in blocks for row in block) == list(range(64))
    for block in blocks:
        micro = collate(batch.select(block), CPU, packed=True)
        assert micro.packing is not None
        assert micro.tokens_bl.numel() <= 3 * 400
        assert sum(len(places.tokens) for places in micro.packing.blocks) <= 3 * 400


def test_a_batch_without_rows_has_no_micro_batch() -> None:
    empty = TrainBatch(rollout_id=0, task="train_0", row_ids=[], columns={})
    assert row_blocks(SimpleNamespace(max_tokens_per_gpu=400, deterministic=False), empty, packed=True) == []


@pytest.mark.parametrize("zeros", ["lm_head.weight", "model.layers.0.self_attn.o_proj.weight"])
def test_a_model_that_does_not_show_what_its_rows_see_stays_padded(zeros: str, model_path: str) -> None:
    model = load_model(model_path, CPU, "--hf-checkpoint")
    model.set_attn_implementation("sdpa")
    for name, parameter in model.named_parameters():
        if name == zeros or ("o_proj" in name and "o_proj" in zeros):
            torch.nn.init.zeros_(parameter)
    if zeros == "lm_head.weight":
        torch.nn.init.zeros_(model.get_output_embeddings().weight)
    pack_where_possible(model)
    assert not is_packed(model)


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


def doge(**sizes: Any) -> PreTrainedModel:
    """As it begins: its layers' masks make no difference before the row is longer than their window."""
    torch.manual_seed(0)
    config = DogeConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **sizes
    )
    return DogeForCausalLM(config)


def test_a_model_whose_layers_have_masks_of_their_own_stays_padded_and_its_log_probs_are_exact_past_its_window() -> (
    None
):
    model = doge(keep_window_size=12)
    pack_where_possible(model)
    assert not is_packed(model)
    tokens = np.arange(3, 33, dtype=np.int32)
    row = TrainBatch(
        rollout_id=0,
        task="train_0",
        row_ids=[RowId(GroupUid("set", 0, 0), 0, 0)],
        columns={"tokens": [tokens], "response_length": np.array([28], dtype=np.int32)},
    )
    with torch.no_grad():
        found, _ = response_log_probs(model, collate(row, CPU, packed=is_packed(model)), 1.0)
        logits = model(torch.from_numpy(tokens).long()[None]).logits[0, 1:-1].log_softmax(-1)
    expected = logits.gather(1, torch.from_numpy(tokens[2:]).long()[:, None])[:, 0]
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own", [{"attention_mask": torch.zeros(1, 1, 3, 3)}, {"sliding_window": 2}])
def test_packed_rows_of_a_layer_with_a_mask_or_a_window_of_its_own_are_refused(own: dict[str, Any]) -> None:
    packing = pack([np.array([7, 8, 1, 6])], np.array([2]), CPU)
    states: Any = [torch.ones(1, 2, 3, 4)] * 3
    options: dict[str, Any] = {"attention_mask": None, "packing": packing}
    assert attention(torch.nn.Module(), *states, **options)[0].shape == (1, 3, 2, 4)
    with pytest.raises(ValueError, match="a mask of its own"):
        attention(torch.nn.Module(), *states, **options | own)


def test_a_probe_of_a_model_draws_no_random_numbers() -> None:
    model = doge()
    before = torch.get_rng_state()
    pack_where_possible(model)
    assert torch.equal(torch.get_rng_state(), before)


class Echo(torch.nn.Module):
    """Adds to each token the one that stands ``distance`` places before it, in whatever row."""

    def __init__(self, inner: torch.nn.Module, distance: int) -> None:
        super().__init__()
        self.inner, self.distance = inner, distance

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(states)
        return out + torch.nn.functional.pad(states, (0, 0, self.distance, 0))[:, : states.shape[1]]


class EchoingLlama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A layer of it looks back over the window that its configuration names."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].mlp = Echo(self.model.layers[0].mlp, config.echo_window)


def test_a_model_is_probed_past_windows_that_no_short_row_reaches() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=40, num_attention_heads=2, initializer_range=0.3, **sizes)
    config.echo_window = 1024
    torch.manual_seed(0)
    echoing, plain = EchoingLlama(copy.deepcopy(config)), LlamaForCausalLM(config)
    for model in (echoing, plain):
        pack_where_possible(model)
    assert (is_packed(echoing), is_packed(plain)) == (False, True)
