"""New weights from a folder: what the fast decoder reads itself, and what transformers reads for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from buffer_rl.embedded.loader import LoadedModel, LoadOptions, checksum_answer
from buffer_rl.errors import EngineError

NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def checksums(model: LoadedModel) -> dict[str, Any]:
    return checksum_answer(model.decoder.named_weights())


def loaded(folder: str | Path, dtype: str = "float32") -> dict[str, Any]:
    """Checksums of a model that was loaded from ``folder`` at its start, by transformers."""
    return checksums(LoadedModel(LoadOptions(model_path=str(folder), dtype=dtype)))


@pytest.fixture
def copied(model_folder: Callable[..., str], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny model's folder, its weights changed by a function, in one file for each dictionary returned."""

    def copy(architecture: str, change: Callable[[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(model_folder(architecture, 1), folder)
        whole = folder / "model.safetensors"
        parts = change(load_file(whole))
        whole.unlink()
        files = {f"part-{number}.safetensors": part for number, part in enumerate(parts)}
        for name, part in files.items():
            save_file(part, folder / name, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return copy


def in_two_files(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    names = sorted(weights)
    return [{name: weights[name] for name in names[start::2]} for start in (0, 1)]


def with_a_head(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{**weights, HEAD: weights["model.embed_tokens.weight"] + 1.0}]


def in_bfloat16(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: tensor.bfloat16() for name, tensor in weights.items()}]


def with_a_stranger(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{**weights, "model.stranger": torch.zeros(2)}]


def without_the_prefix(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name.removeprefix("model."): tensor for name, tensor in weights.items()}]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("change", [lambda weights: [weights], in_two_files, in_bfloat16])
def test_a_folder_of_the_served_model_is_taken_without_a_module_and_gives_what_a_fresh_load_gives(
    architecture: str,
    change: Any,
    dtype: str,
    model_folder: Callable[..., str],
    copied: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = copied(architecture, change)
    expected = loaded(new, dtype)
    model = LoadedModel(LoadOptions(model_path=model_folder(architecture), dtype=dtype))
    assert checksums(model) != expected
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    model.replace(str(new))
    assert checksums(model) == expected


@pytest.mark.parametrize("change", [with_a_head, with_a_stranger, without_the_prefix])
def test_other_names_in_a_folder_mean_what_transformers_takes_them_for(
    change: Any, model_folder: Callable[..., str], copied: Callable[..., Path]
) -> None:
    new = copied("qwen3", change)
    model = LoadedModel(LoadOptions(model_path=model_folder("qwen3")))
    model.replace(str(new))
    assert checksums(model) == loaded(new)


def without_a_norm(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: tensor for name, tensor in weights.items() if name != NORM}]


def with_a_short_norm(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{**weights, NORM: weights[NORM][:-1].clone()}]


def without_a_head(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: tensor for name, tensor in weights.items() if name != HEAD}]


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("qwen3", without_a_norm, f"weights are missing: {NORM}"),
        ("qwen3", with_a_short_norm, "cannot load the model: .*mismatched"),
        ("llama", without_a_head, f"weights are missing: {HEAD}"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_and_the_old_weights_stay(
    architecture: str, change: Any, message: str, model_folder: Callable[..., str], copied: Callable[..., Path]
) -> None:
    model = LoadedModel(LoadOptions(model_path=model_folder(architecture)))
    before = checksums(model)
    with pytest.raises(EngineError, match=message):
        model.replace(str(copied(architecture, change)))
    assert checksums(model) == before


def test_a_file_that_its_index_names_and_that_is_missing_or_cut_off_is_refused(
    model_folder: Callable[..., str], copied: Callable[..., Path]
) -> None:
    folder = copied("qwen3", in_two_files)
    model = LoadedModel(LoadOptions(model_path=model_folder("qwen3")))
    before, part = checksums(model), folder / "part-1.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(EngineError, match="cannot load"):
        model.replace(str(folder))
    part.unlink()
    with pytest.raises(EngineError, match="cannot load"):
        model.replace(str(folder))
    assert checksums(model) == before


def test_a_folder_with_another_rope_is_served_with_it(model_folder: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "long"
    shutil.copytree(model_folder("qwen3", 0), folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = 37.0
    config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config))
    model = LoadedModel(LoadOptions(model_path=model_folder("qwen3", 0)))
    before = model.decoder.prefill([(5, 6, 7, 8)])[0].logits
    model.replace(str(folder))
    after = model.decoder.prefill([(5, 6, 7, 8)])[0].logits
    afresh = LoadedModel(LoadOptions(model_path=str(folder))).decoder.prefill([(5, 6, 7, 8)])[0].logits
    assert torch.equal(after, afresh)
    assert not torch.equal(after, before)
