from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, MixtralConfig

from buffer_rl.errors import ConfigError
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.model import Model, weight_buckets
from buffer_rl.trainer.pretrained import load_model, load_tokenizer, pick_device

CPU = torch.device("cpu")
FLAG = "--hf-checkpoint"


def test_a_missing_folder_is_an_error_that_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--hf-checkpoint: the folder .*nowhere does not exist"):
        load_model(str(tmp_path / "nowhere"), CPU, FLAG)
    with pytest.raises(ConfigError, match="has no config"):
        load_tokenizer(str(tmp_path), FLAG)
    with pytest.raises(ConfigError, match="no model was named"):
        load_model(None, CPU, FLAG)


def test_a_damaged_weights_file_is_an_error(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="does not load"):
        load_model(folder, CPU, FLAG)


def test_a_folder_that_lacks_weights_is_an_error_not_random_numbers(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights .* model\.norm\.weight"):
        load_model(folder, CPU, FLAG)


def test_the_model_is_float32_and_without_dropout(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture="gpt_neox", hidden_dropout=0.5)
    model = load_model(folder, CPU, FLAG)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt_neox", "gemma3"])
def test_exported_names_and_values_are_those_of_a_saved_folder(architecture: str, tmp_path: Path) -> None:
    model = load_model(make_tiny_model(tmp_path / "a", architecture=architecture), CPU, FLAG)
    model.save_pretrained(tmp_path / "b")
    _assert_equal_tensors(dict(Model(model).weights()), load_file(tmp_path / "b" / "model.safetensors"))


def test_fused_experts_are_exported_under_their_checkpoint_names(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=40, num_key_value_heads=1, num_local_experts=4, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "a")
    model = load_model(str(tmp_path / "a"), CPU, FLAG)
    _assert_equal_tensors(dict(Model(model).weights()), load_file(tmp_path / "a" / "model.safetensors"))


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_model_whose_tokens_see_later_ones_is_refused(is_decoder: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=40, is_decoder=is_decoder, **sizes)
    BertLMHeadModel(config).save_pretrained(tmp_path)
    if is_decoder:
        load_model(str(tmp_path), CPU, FLAG)
    else:
        with pytest.raises(ConfigError, match=r"--hf-checkpoint: BertLMHeadModel .* is no causal language model"):
            load_model(str(tmp_path), CPU, FLAG)


def test_buckets_hold_every_tensor_once_and_keep_to_their_size() -> None:
    state = {
        name: torch.full((size,), float(i)) for i, (name, size) in enumerate({"a": 3, "b": 2, "c": 9, "d": 1}.items())
    }
    buckets = list(weight_buckets(state.items(), bucket_bytes=5 * 4))
    assert [list(bucket) for bucket in buckets] == [["a", "b"], ["c"], ["d"]]
    _assert_equal_tensors({name: tensor for bucket in buckets for name, tensor in bucket.items()}, state)


def test_a_bucket_does_not_change_when_the_weights_do() -> None:
    weight = torch.zeros(3)
    bucket = next(weight_buckets([("a", weight)]))
    weight += 1
    assert bucket["a"].tolist() == [0, 0, 0]


def test_a_saved_folder_has_the_tokenizer_and_gives_equal_logits(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "a")
    model, tokenizer = load_model(source, CPU, FLAG), load_tokenizer(source, FLAG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    Model(model).save_hf(tokenizer, str(tmp_path / "b"))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(reloaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert load_tokenizer(str(tmp_path / "b"), FLAG)("ab=")["input_ids"] == tokenizer("ab=")["input_ids"]
    assert json.loads((tmp_path / "b" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_a_device_that_is_not_there_is_an_error() -> None:
    assert pick_device("cpu") == CPU
    if torch.cuda.is_available():
        assert pick_device("auto").type == "cuda"
    else:
        assert pick_device("auto") == CPU
        with pytest.raises(ConfigError, match="no CUDA device"):
            pick_device("cuda")


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" not in os.environ, reason="make test-processors names the kernels")
def test_torch_has_the_kernels_that_were_asked_for() -> None:
    assert torch.backends.cpu.get_cpu_capability() == os.environ["ATEN_CPU_CAPABILITY"].upper()


def _assert_equal_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
