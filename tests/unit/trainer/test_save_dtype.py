"""The number format of the folders that a run writes for others, and of what it keeps for itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from buffer_rl.cli import main
from buffer_rl.options.section import Options
from buffer_rl.records.groups import Topology, TrainBatch
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.rank import TrainRank
from buffer_rl.trainer.save_dtype import cast_folder
from buffer_rl.trainer.torch_trainer import TorchTrainer
from buffer_rl_megatron.bridge import write_folder
from harness.checkpoints import write_checkpoint
from harness.trainers import make_trainer, step

MakeArgs = Callable[..., Options]
MakeBatch = Callable[..., TrainBatch]
NORM = "model.norm.weight"


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    """A model in bfloat16, whose last norm is in float32."""
    folder = Path(make_tiny_model(tmp_path / "halves"))
    cast_folder(folder, lambda name: "float32" if name == NORM else "bfloat16")
    return folder


def rank_of(trainer: Any, args: Options) -> Any:
    rank: Any = object.__new__(TrainRank)
    rank._args, rank._built = args, trainer
    return rank


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def moved(args: Options, batch: TrainBatch) -> TorchTrainer:
    """After a step, so that the weights are no numbers of bfloat16 any more."""
    trainer = make_trainer(args)
    step(trainer, batch)
    return trainer


def exported(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in trainer.export() for name, tensor in bucket.items()}


@pytest.mark.parametrize("save_dtype", ["input", "float32", "bfloat16", "float16"])
def test_a_folder_for_others_has_the_input_s_format_or_the_one_that_is_asked_for(
    save_dtype: str, halves: Path, make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path
) -> None:
    args = make_args(hf_checkpoint=str(halves), save_dtype=save_dtype)
    trainer = moved(args, make_batch())
    rank_of(trainer, args).save_hf(str(tmp_path / "hf"))
    named = "bfloat16" if save_dtype == "input" else save_dtype
    trained, found = exported(trainer), weights_of(tmp_path / "hf")
    assert found.keys() == trained.keys()
    for name, tensor in trained.items():
        assert tensor.dtype == torch.float32, "what is published stays as it is trained"
        dtype = torch.float32 if save_dtype == "input" and name == NORM else getattr(torch, named)
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor.to(dtype)), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == named
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype == getattr(torch, named)


def test_what_a_run_reads_again_itself_keeps_its_format(
    halves: Path, make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path
) -> None:
    """A reference that is updated, and the state of a checkpoint: the resumed run has the same bits."""
    args, batch = make_args(hf_checkpoint=str(halves)), make_batch()
    trainer = moved(args, batch)
    (tmp_path / "trainer").mkdir()
    trainer.save(str(tmp_path / "trainer"))
    rank = rank_of(trainer, args)
    rank.save_hf(str(tmp_path / "hf"))
    rank.write_hf(str(tmp_path / "ref"))
    trained = exported(trainer)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in trained.values())
    found = weights_of(tmp_path / "ref")
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    resumed = make_trainer(args)
    resumed.load(str(tmp_path / "trainer"))
    assert all(torch.equal(tensor, trained[name]) for name, tensor in exported(resumed).items())
    for each in (trainer, resumed):
        step(each, batch)
    after = exported(trainer)
    assert all(torch.equal(tensor, after[name]) for name, tensor in exported(resumed).items())


def test_a_folder_of_several_files_is_cast_a_file_at_a_time_and_its_index_is_true(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([1 + 2**-12, 2.0]), "b": torch.tensor([3.0]), "ids": torch.tensor([7, 8])}
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    save_file({"a": tensors["a"]}, tmp_path / files["a"], metadata={"format": "pt"})
    save_file({"b": tensors["b"], "ids": tensors["ids"]}, tmp_path / files["b"], metadata={"format": "pt"})
    index = {"metadata": {"total_size": 28}, "weight_map": files | {"ids": files["b"]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"torch_dtype": "float32", "text_config": {"dtype": "float32", "size": 3}}')
    cast_folder(tmp_path, lambda _: "float16")
    found = weights_of(tmp_path)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "a": torch.float16, "b": torch.float16, "ids": torch.int64,
    }  # fmt: skip
    assert found["a"].tolist() == [1.0, 2.0]
    written = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert written == {**index, "metadata": {"total_size": 3 * 2 + 2 * 8}}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"torch_dtype": "float16", "text_config": {"dtype": "float16", "size": 3}}
    before = {file.name: file.stat().st_ino for file in tmp_path.iterdir()}
    cast_folder(tmp_path, lambda _: "float16")
    assert {file.name: file.stat().st_ino for file in tmp_path.iterdir()} == before, "nothing is left to write"


def test_a_folder_of_megatrons_exporter_is_cast_as_those_of_the_torch_trainer(
    halves: Path, make_args: MakeArgs, tmp_path: Path
) -> None:
    args = make_args(hf_checkpoint=str(halves))
    weights = {name: tensor.float() + 1e-4 for name, tensor in weights_of(halves).items()}

    def write(path: str) -> None:
        write_folder(weights.items(), str(halves), path, shard_bytes=20_000)

    trainer = SimpleNamespace(topology=Topology(dp_rank=0, dp_size=1), save_hf=write)
    rank_of(trainer, args).save_hf(str(tmp_path / "hf"))
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    found = weights_of(tmp_path / "hf")
    for name, tensor in weights_of(halves).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], weights[name].to(tensor.dtype))


def test_a_rank_that_writes_no_folder_casts_none(make_args: MakeArgs, tmp_path: Path) -> None:
    args = make_args(save_dtype="float16")
    rank_of(make_trainer(args, rank=1, world_size=2), args).save_hf(str(tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()


@pytest.fixture
def saves(tmp_path: Path, halves: Path) -> Path:
    def fill(folder: Path) -> None:
        halves.rename(folder / "hf")

    write_checkpoint(tmp_path / "saves", 3, fill)
    return tmp_path / "saves"


@pytest.mark.parametrize("asked", [None, "float32", "float16"])
def test_a_checkpoint_is_exported_as_it_is_or_in_the_format_that_is_asked_for(
    asked: str | None, saves: Path, tmp_path: Path
) -> None:
    argv = ["export", "--load", str(saves), "--output", str(tmp_path / "out")]
    assert main([*argv, "--save-dtype", asked] if asked else argv) == 0
    kept, found = (weights_of(folder) for folder in (saves / "step_000003" / "hf", tmp_path / "out"))
    for name, tensor in kept.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, asked)) if asked else tensor)
        assert found[name].dtype == (getattr(torch, asked) if asked else tensor.dtype)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == (asked or "bfloat16")
