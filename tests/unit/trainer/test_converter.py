"""Converters that load a folder and export it themselves: parameters that hold several of the folder's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from buffer_rl.errors import PluginError
from buffer_rl.options.section import Options
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.converter import folder_tensors
from buffer_rl.trainer.model import ModelFactory, unique_state, weight_buckets
from buffer_rl.trainer.torch_trainer import TorchTrainer
from harness.trainers import make_trainer, step

MakeArgs = Callable[..., Options]
MakeBatch = Callable[..., TrainBatch]


class Rows(torch.nn.Module):
    """The product with some rows of a matrix that another module owns."""

    def __init__(self, owner: torch.nn.Linear, start: int, stop: int) -> None:
        super().__init__()
        self.weight_of: Callable[[], Tensor] = lambda: owner.weight[
            start:stop
        ]  # the parameter is registered once, with its owner

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight_of())


def build_fused(args: Any) -> Any:
    """The model of ``args.hf_checkpoint`` with one matrix for q, k and v in each layer, and random weights."""
    config = AutoConfig.from_pretrained(args.hf_checkpoint)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    for layer in model.model.layers:
        attention = layer.self_attn
        sizes = [getattr(attention, f"{part}_proj").out_features for part in "qkv"]
        attention.qkv_proj = torch.nn.Linear(model.config.hidden_size, sum(sizes), bias=False)
        start = 0
        for part, size in zip("qkv", sizes, strict=True):
            setattr(attention, f"{part}_proj", Rows(attention.qkv_proj, start, start + size))
            start += size
    return model


class Fused:
    """Loads and exports the models of ``build_fused``. asked: the names that ``export`` yielded."""

    left_out = ""
    asked: ClassVar[list[str]] = []

    def __init__(self, args: Any) -> None:
        config = AutoConfig.from_pretrained(args.hf_checkpoint)
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.sizes = [config.head_dim * number for number in heads]

    def load(self, model: Any, folder: str) -> None:
        rows = dict(Fused.export(self, model))
        for name, tensor in folder_tensors(folder):
            if not self.left_out or self.left_out not in name:
                rows[name].copy_(tensor)

    def export(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        self.asked.clear()
        for name, tensor in unique_state(model).items():
            fused = "qkv_proj" in name
            parts = torch.split(tensor, self.sizes) if fused else [tensor]
            for part, rows in zip("qkv" if fused else "o", parts, strict=True):
                self.asked.append(name.replace("qkv_proj", f"{part}_proj"))
                yield self.asked[-1], rows


def fused(converter: type = Fused) -> dict[str, Any]:
    return {"custom_model_provider_path": build_fused, "model_converter_path": converter}


def factory(args: Any) -> ModelFactory:
    return ModelFactory(args, PluginRegistry(), torch.device("cpu"))


def weights(trainer: TorchTrainer) -> dict[str, Tensor]:
    return {name: tensor for bucket in trainer.export() for name, tensor in bucket.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_fused_attention_is_loaded_and_exported_bit_equal(make_args: MakeArgs, model_path: str) -> None:
    trainer = make_trainer(make_args(**fused()))
    own = [name for name, _ in trainer._actor.named_parameters() if "self_attn" in name and "proj" in name]
    assert own == [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(2) for part in ("o", "qkv")]
    assert_equal(weights(trainer), load_file(f"{model_path}/model.safetensors"))


def test_fused_attention_trains_as_its_parts_do_and_is_saved_under_their_names(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path
) -> None:
    trainers = [make_trainer(make_args()), make_trainer(make_args(**fused()))]
    start, batch = weights(trainers[0])["model.layers.0.self_attn.k_proj.weight"].clone(), make_batch()
    for trainer in trainers:
        step(trainer, batch)
    expected, found = (weights(trainer) for trainer in trainers)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4)
    assert (found["model.layers.0.self_attn.k_proj.weight"] - start).abs().max() > 1e-3
    trainers[1].save_hf(str(tmp_path))
    assert_equal(load_file(tmp_path / "model.safetensors"), found)


@pytest.mark.parametrize(
    ("part", "name"), [("1.self_attn.k_proj", "qkv_proj.weight"), ("0.mlp.up", "mlp.up_proj.weight")]
)
def test_a_load_that_leaves_out_a_weight_or_a_part_of_one_is_refused_by_name(
    make_args: MakeArgs, model_path: str, part: str, name: str
) -> None:
    left = type("Left", (Fused,), {"left_out": f"layers.{part}"})
    args = make_args(**fused(left))
    with pytest.raises(PluginError) as caught:
        factory(args).build(model_path, "--hf-checkpoint")
    assert caught.value.where == f"converter {left!r}, load of {model_path}"
    assert caught.value.what.startswith("1 weights were not written, or hold NaN, such as model.layers.")
    assert caught.value.what.endswith(name)


def test_a_buffer_of_integers_may_keep_what_the_provider_gave_it(make_args: MakeArgs, model_path: str) -> None:
    def with_buffers(args: Any) -> Any:
        model = build_fused(args)
        model.register_buffer("counts", torch.arange(3))
        model.register_buffer("scale", torch.ones(3), persistent=False)
        return model

    class Floats(Fused):
        def export(self, model: Any) -> Iterator[tuple[str, Tensor]]:
            return (pair for pair in super().export(model) if pair[0] != "counts")

    args = make_args(custom_model_provider_path=with_buffers, model_converter_path=Floats)
    model: Any = factory(args).build(model_path, "--hf-checkpoint").module
    assert model.counts.tolist() == [0, 1, 2]
    assert model.scale.tolist() == [1, 1, 1]


def test_tensors_that_a_converter_assigns_become_float32(make_args: MakeArgs, model_path: str) -> None:
    class Assigning(Fused):
        def load(self, model: Any, folder: str) -> None:
            super().load(model, folder)
            model.load_state_dict({name: t.bfloat16() for name, t in model.state_dict().items()}, assign=True)
            model.tie_weights()

    args = make_args(**fused(Assigning))
    model = factory(args).build(model_path, "--hf-checkpoint")
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float32}
    stored = load_file(f"{model_path}/model.safetensors")
    found = dict(model.weights())
    assert_equal(found, {name: tensor.bfloat16().float() for name, tensor in stored.items()})


def test_a_name_that_is_exported_twice_is_refused(make_args: MakeArgs) -> None:
    class Twice(Fused):
        def export(self, model: Any) -> Iterator[tuple[str, Tensor]]:
            for _, tensor in super().export(model):
                yield "w", tensor

    with pytest.raises(PluginError, match="export: it yielded w twice"):
        weights(make_trainer(make_args(**fused(Twice))))


def test_the_first_bucket_is_there_before_the_later_tensors_are_asked_for(make_args: MakeArgs, model_path: str) -> None:
    model = factory(make_args(**fused())).build(model_path, "--hf-checkpoint")
    names = [name for name, _ in model.weights()]
    sizes = [tensor.numel() * 4 for _, tensor in model.weights()]
    buckets = weight_buckets(model.weights(), sum(sizes[:3]))
    assert list(next(buckets)) == names[:3]
    assert Fused.asked == names[:4]
    exported = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    assert list(exported) == names[3:]
    assert not any(tensor.requires_grad for tensor in exported.values())


def test_load_may_write_to_parameters_and_what_is_exported_carries_no_gradient(
    make_args: MakeArgs, model_path: str
) -> None:
    class Live(Fused):
        def load(self, model: Any, folder: str) -> None:
            super().load(model, folder)
            for parameter in model.parameters():
                parameter.mul_(2)

        def export(self, model: Any) -> Iterator[tuple[str, Tensor]]:
            return ((name, 2 * parameter) for name, parameter in model.named_parameters())

    model = factory(make_args(**fused(Live))).build(model_path, "--hf-checkpoint")
    assert not any(tensor.requires_grad for _, tensor in model.weights())
