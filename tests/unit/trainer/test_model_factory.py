"""Models of the user's own: built by a provider, filled and exported through a converter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.errors import PluginError
from buffer_rl.options.section import Options
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.output_layer import is_fused
from buffer_rl.trainer.torch_trainer import TorchTrainer
from harness.trainers import LARGE_EPS, make_trainer, step

MakeArgs = Callable[..., Options]
MakeBatch = Callable[..., TrainBatch]

RENAMED = """
import torch
from types import SimpleNamespace
from transformers import AutoConfig, AutoModelForCausalLM
from buffer_rl.trainer.converter import NameMap

class Wrapped(torch.nn.Module):
    '''No model of transformers': other names, a prefix.'''
    def __init__(self, args):
        super().__init__()
        self.inner = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.hf_checkpoint))
    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()
    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=self.inner(input_ids=input_ids, use_cache=False).logits)

def build(args):
    return Wrapped(args)

class Names(NameMap):
    def to_trainer(self, name, tensor):
        yield "inner." + name, tensor
    def to_hf(self, name, tensor):
        yield name.removeprefix("inner."), tensor

class Half(Names):
    def to_trainer(self, name, tensor):
        if "mlp" not in name:
            yield "inner." + name, tensor

class Strange(Names):
    def to_trainer(self, name, tensor):
        yield "other." + name, tensor

class Flat(Names):
    def to_trainer(self, name, tensor):
        yield "inner." + name, tensor.flatten()

class Twice(Names):
    def to_hf(self, name, tensor):
        yield "w", tensor

class Text(Names):
    def to_hf(self, name, tensor):
        return "weights"

class Bare(Names):
    def to_trainer(self, name, tensor):
        yield tensor

class Late(Names):
    def to_hf(self, name, tensor):
        yield name, tensor
        raise KeyError("half way")

def text(args): return "model"
def frozen(args): return build(args).requires_grad_(False)
def headless(args): return torch.nn.Linear(2, 2)
def blind(args):
    model = build(args)
    model.forward = lambda input_ids, use_cache: input_ids
    return model
def broken(args):
    model = build(args)
    model.forward = lambda input_ids, use_cache: {}["no key"]
    return model
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "own_model.py"
    path.write_text(RENAMED)
    return str(path)


def _weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in trainer.export() for name, tensor in bucket.items()}


def _step(trainer: TorchTrainer, batch: TrainBatch) -> dict[str, float]:
    return step(trainer, batch)


def test_a_renamed_model_trains_as_the_built_in_one_and_leaves_the_same_folder(
    make_args: MakeArgs, make_batch: MakeBatch, module: str, tmp_path: Path
) -> None:
    own = {"custom_model_provider_path": f"{module}:build", "model_converter_path": f"{module}:Names"}
    plain, mine = make_trainer(make_args(**LARGE_EPS)), make_trainer(make_args(**own, **LARGE_EPS))
    assert is_fused(plain._actor)
    assert is_fused(mine._actor)
    before = _weights(plain)
    metrics = [_step(trainer, make_batch()) for trainer in (plain, mine)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-7)
    expected, found = _weights(plain), _weights(mine)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)  # the built-in one takes packed rows
    assert all((tensor - before[name]).abs().max() > 1e-3 for name, tensor in expected.items())
    mine.save_hf(str(tmp_path / "hf"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in found.items())
    mine.save(str(tmp_path / "state"))
    other = make_trainer(make_args(**own))
    other.load(str(tmp_path / "state"))
    assert all(torch.equal(tensor, found[name]) for name, tensor in _weights(other).items())


def test_the_reference_model_is_built_by_the_provider_too(
    make_args: MakeArgs, make_batch: MakeBatch, module: str
) -> None:
    own = {"custom_model_provider_path": f"{module}:build", "model_converter_path": f"{module}:Names"}
    trainer, batch = make_trainer(make_args(**own, use_kl_loss=True)), make_batch()
    actor, ref = trainer.log_probs("actor", batch), trainer.log_probs("ref", batch)
    assert all((a == r).all() for a, r in zip(actor, ref, strict=True))
    assert type(trainer._named("ref").module).__name__ == "Wrapped"


def test_random_weights_of_a_provider_are_equal_on_every_rank_and_under_their_own_names(
    make_args: MakeArgs, module: str
) -> None:
    args = make_args(custom_model_provider_path=f"{module}:build")
    torch.manual_seed(1)
    first = _weights(make_trainer(args))
    torch.manual_seed(2)
    second = _weights(make_trainer(args))
    assert all(name.startswith("inner.") for name in first)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("text", "it returned 'model' (str)"),
        ("headless", "it returned Linear"),
        ("frozen", "no parameter requires a gradient"),
        ("blind", "an object with logits"),
        ("broken", "forward of its model: it raised KeyError: 'no key'"),
    ],
)
def test_a_model_that_cannot_be_trained_is_an_error_at_the_start(
    make_args: MakeArgs, module: str, name: str, problem: str
) -> None:
    with pytest.raises(PluginError) as caught:
        make_trainer(make_args(custom_model_provider_path=f"{module}:{name}"))
    assert f"model_provider '{module}:{name}'" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Half", ": 6 weights were not written, or hold NaN, such as inner.model.layers.0.mlp"),
        ("Strange", "load: to_trainer of model.embed_tokens.weight yielded 'other.model.embed_tokens.weight'"),
        ("Flat", "'inner.model.embed_tokens.weight' of shape ("),
        ("Twice", "export: it yielded w twice"),
        ("Text", "export: to_hf of inner.model.embed_tokens.weight returned 'weights' (str)"),
        ("Bare", "load: to_trainer of model.embed_tokens.weight yielded tensor("),
        ("Late", "export: it raised KeyError: 'half way'"),
    ],
)
def test_a_converter_that_loses_something_is_named(make_args: MakeArgs, module: str, name: str, problem: str) -> None:
    own: dict[str, Any] = {
        "custom_model_provider_path": f"{module}:build",
        "model_converter_path": f"{module}:{name}",
    }
    with pytest.raises(PluginError) as caught:
        _weights(make_trainer(make_args(**own)))
    assert f"converter '{module}:{name}'" in str(caught.value)
    assert problem in str(caught.value)
