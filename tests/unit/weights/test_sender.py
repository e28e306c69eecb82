"""What the trainer publishes is checked against the engines' model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import TrainError
from buffer_rl.options.section import compose
from buffer_rl.testing.tiny import ARCHITECTURES, make_tiny_model
from buffer_rl.trainer.model import Model
from buffer_rl.trainer.pretrained import load_model
from buffer_rl.weights.sender import PublishedNames

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a model whose head is tied to its embeddings."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def weights_of(folder: str) -> Weights:
    return dict(Model(load_model(folder, torch.device("cpu"), "--hf-checkpoint")).weights())


def names_of(folder: str) -> PublishedNames:
    return PublishedNames(compose(CORE_SECTIONS)(hf_checkpoint=folder))


def check(folder: str, weights: Weights) -> None:
    halves = [dict(list(weights.items())[start::2]) for start in (0, 1)]
    assert list(names_of(folder).checked(halves)) == halves


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_weights_of_the_folder_itself_are_right(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture)
    check(folder, weights_of(folder))


def test_a_tied_head_may_come_or_not(folder: str) -> None:
    weights = weights_of(folder)
    assert "lm_head.weight" not in weights
    check(folder, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: {n: t for n, t in weights.items() if n != NORM}, f"missing: {NORM}$"),
        (lambda weights: weights | {"a.stranger": torch.ones(2)}, r"unknown: a\.stranger$"),
        (lambda weights: weights | {NORM: torch.ones(3)}, rf"of another shape: {NORM} \[3\] \(expected: \[64\]\)$"),
    ],
)
def test_missing_unknown_and_misshapen_weights_are_named(
    folder: str, change: Callable[[Weights], Weights], message: str
) -> None:
    with pytest.raises(TrainError) as caught:
        check(folder, change(weights_of(folder)))
    assert folder in caught.value.expected
    assert re.search(message, caught.value.what)


def test_a_model_that_transformers_does_not_know_is_compared_with_its_files(folder: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(Path(folder, "model.safetensors").read_bytes())
    config: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "of_my_own", "architectures": ["Mine"]}))
    weights = weights_of(folder)
    check(str(tmp_path), weights)
    del weights[NORM]
    with pytest.raises(TrainError, match=NORM):
        check(str(tmp_path), weights)


def test_another_layout_is_compared_again_and_the_same_one_is_not(folder: str, tmp_path: Path) -> None:
    weights, gone = weights_of(folder), tmp_path / "model"
    Path(folder).rename(gone)
    try:
        names = names_of(str(gone))
        assert len(list(names.checked([weights]))) == 1
        gone.rename(folder)
        assert len(list(names.checked([weights]))) == 1, "reads no folder"
        Path(folder).rename(gone)
        with pytest.raises(TrainError, match="unknown"):
            list(names.checked([weights, {"a.stranger": torch.ones(2)}]))
    finally:
        if gone.exists():
            gone.rename(folder)


def test_what_cannot_be_compared_passes(tmp_path: Path) -> None:
    def buckets() -> Iterator[Weights]:
        yield {"a": torch.ones(2)}

    assert len(list(names_of(str(tmp_path)).checked(buckets()))) == 1
