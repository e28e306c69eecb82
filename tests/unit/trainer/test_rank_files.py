from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.errors import CheckpointError
from buffer_rl.trainer.optimizer import Optimizer
from buffer_rl.trainer.rank_files import load_state, save_state
from harness.processes import holds_within


def _trained(size: int = 3, *, save_optim: bool = True) -> tuple[torch.nn.Module, Optimizer]:
    args = SimpleNamespace(
        lr=0.1,
        lr_warmup_iters=0,
        lr_decay_style="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        clip_grad=1.0,
        deterministic=False,
        optimizer_cpu_offload=False,
        save_optim=save_optim,
    )
    model = torch.nn.Linear(size, 1)
    optimizer = Optimizer(args, model, world_size=1)
    model(torch.ones(1, size)).sum().backward()
    optimizer.step(1.0)
    return model, optimizer


def _save(folder: Path, rank: int = 0) -> tuple[torch.nn.Module, Optimizer]:
    model, optimizer = _trained()
    save_state(str(folder), model, optimizer, model.state_dict(), rank)
    return model, optimizer


def test_weights_moments_step_and_random_state_come_back(tmp_path: Path) -> None:
    saved, saved_optimizer = _save(tmp_path)
    drawn = (random.random(), float(np.random.rand()), torch.rand(1).item())
    model, optimizer = _trained()
    load_state(str(tmp_path), model, optimizer, model.state_dict(), 0)
    assert (random.random(), float(np.random.rand()), torch.rand(1).item()) == drawn
    assert optimizer.step_count == 1
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    for name, tensor in saved_optimizer.state_tensors().items():
        assert torch.equal(optimizer.state_tensors()[name], tensor)


def test_without_save_optim_the_step_comes_back_and_moments_start_anew(tmp_path: Path) -> None:
    model, optimizer = _trained(save_optim=False)
    save_state(str(tmp_path), model, optimizer, model.state_dict(), 0)
    assert load_file(tmp_path / "optimizer.safetensors") == {}
    resumed, with_moments = _trained()  # of the option that a run is resumed with nothing depends
    load_state(str(tmp_path), resumed, with_moments, resumed.state_dict(), 0)
    assert (with_moments.step_count, with_moments.state_tensors()) == (1, {})
    resumed(torch.ones(1, 3)).sum().backward()
    with_moments.step(1.0)
    assert with_moments.step_count == 2
    assert float(with_moments.state_tensors()["step.weight"]) == 1


def test_what_is_written_in_the_background_is_the_state_of_the_call(tmp_path: Path) -> None:
    model, optimizer = _trained()
    now = {**model.state_dict(), **optimizer.state_tensors()}
    before = {name: tensor.clone() for name, tensor in now.items()}
    is_saved = save_state(str(tmp_path), model, optimizer, model.state_dict(), 0, background=True)
    with torch.no_grad():
        for tensor in now.values():  # training goes on
            tensor.add_(1.0)
    assert holds_within(30.0, is_saved)
    written = load_file(tmp_path / "weights.safetensors") | load_file(tmp_path / "optimizer.safetensors")
    assert written.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(written[name], tensor)


def test_a_background_write_that_fails_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    model, optimizer = _trained()
    (tmp_path / "optimizer.safetensors").mkdir()
    is_saved = save_state(str(tmp_path), model, optimizer, model.state_dict(), 0, background=True)
    with pytest.raises(CheckpointError, match=f"(?s){tmp_path}.*cannot be written"):
        holds_within(30.0, is_saved)


@pytest.mark.parametrize("name", ["trainer.json", "weights.safetensors", "optimizer.safetensors", "random_0.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_missing_or_damaged_file_is_an_error_that_names_it(name: str, damage: str, tmp_path: Path) -> None:
    _save(tmp_path)
    file = tmp_path / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-5])
    model, optimizer = _trained()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=name):
        load_state(str(tmp_path), model, optimizer, model.state_dict(), 0)
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())


def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    _save(tmp_path)
    model, optimizer = _trained(size=4)
    with pytest.raises(CheckpointError, match=r"weights do not fit, such as weight: \(1, 3\)"):
        load_state(str(tmp_path), model, optimizer, model.state_dict(), 0)
    meta = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        load_state(str(tmp_path), model, optimizer, model.state_dict(), 0)


def test_other_ranks_write_only_their_random_state_and_new_ranks_keep_theirs(tmp_path: Path) -> None:
    _save(tmp_path)
    weights = (tmp_path / "weights.safetensors").read_bytes()
    _save(tmp_path, rank=1)
    assert (tmp_path / "weights.safetensors").read_bytes() == weights
    assert (tmp_path / "random_1.json").is_file()
    model, optimizer = _trained()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load_state(str(tmp_path), model, optimizer, model.state_dict(), 2)
    assert torch.equal(torch.rand(1), expected)
