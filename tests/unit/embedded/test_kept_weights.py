"""The version that an engine keeps for deltas: what a delta makes of it is served, and a fault of either is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from buffer_rl.embedded.loader import LoadedModel, LoadOptions, checksum_answer
from buffer_rl.errors import EngineError
from buffer_rl.weights.delta import DeltaSource, encode, weights_digest
from buffer_rl.weights.disk import CONTENTS, read_contents

Weights = dict[str, torch.Tensor]
BF16 = torch.bfloat16


def stepped(weights: Mapping[str, torch.Tensor], seed: int, share: float = 0.02) -> Weights:
    """Each element changed with the probability ``share``, and one of each tensor in any case."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in sorted(weights.items()):
        chosen = torch.rand(tensor.shape, generator=random) < share
        chosen.view(-1)[int(torch.randint(tensor.numel(), (), generator=random))] = True
        found[name] = torch.where(chosen, tensor * 1.25 + 0.01, tensor).contiguous()
    return found


def delta(before: Weights, after: Weights) -> Weights:
    return {part: value for name in after for part, value in encode(name, before[name], after[name]).items()}


def served(model: LoadedModel) -> str:
    return str(checksum_answer(model.decoder.named_weights())["per_engine_checksum"])


@pytest.fixture
def start(model_folder: Callable[..., str]) -> Callable[[str, str], tuple[LoadedModel, list[Weights]]]:
    """A model that keeps the first of five versions, and these."""

    def start_model(architecture: str = "qwen3", dtype: str = "bfloat16") -> tuple[LoadedModel, list[Weights]]:
        path = model_folder(architecture)
        model = LoadedModel(LoadOptions(model_path=path, dtype=dtype))
        first = load_file(Path(path, "model.safetensors"))
        versions = [{name: tensor.to(getattr(torch, dtype)) for name, tensor in first.items()}]
        for seed in range(4):
            versions.append(stepped(versions[-1], seed))
        model.replace(versions[0], weights_digest(versions[0]))
        return model, versions

    return start_model


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "gemma3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deltas_give_the_bits_that_whole_versions_give_without_a_whole_load(
    start: Any, model_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: str
) -> None:
    model, versions = start(architecture, dtype)
    whole = LoadedModel(model.options)
    monkeypatch.setattr(model, "_replace_whole", None)
    for before, after in pairwise(versions):
        parts = delta(before, after)
        assert any(name.endswith("norm.weight:values") for name in parts)
        model.replace(parts, weights_digest(after), weights_digest(before))
        whole.replace(after)
        assert served(model) == served(whole)
        assert model.kept.digest == weights_digest(after)
    assert whole.kept.digest is None


def test_what_a_module_holds_under_other_names_is_loaded_as_a_whole(start: Any) -> None:
    model, versions = start("qwen3_moe")
    whole = LoadedModel(model.options)
    model.replace(delta(*versions[:2]), weights_digest(versions[1]), weights_digest(versions[0]))
    whole.replace(versions[1])
    assert served(model) == served(whole)


def test_after_the_weights_were_dropped_a_delta_brings_all_of_them_back(start: Any) -> None:
    for architecture in ("qwen3", "gemma3"):
        model, versions = start(architecture)
        whole = LoadedModel(model.options)
        model.decoder.drop_weights()
        digests = [weights_digest(version) for version in versions]
        model.replace({}, digests[0], digests[0])
        whole.replace(versions[0])
        assert served(model) == served(whole)


def faults(versions: list[Weights]) -> dict[str, tuple[Weights, Weights]]:
    """What is kept and what arrives, in place of the first version and of the delta to the second."""
    kept, parts = versions[0], delta(*versions[:2])
    norm, values = "model.norm.weight", "model.layers.0.mlp.up_proj.weight:values"
    one_bit = {**kept, norm: (kept[norm].view(torch.int16) ^ torch.eye(1, len(kept[norm]), dtype=torch.int16)[0])}
    one_bit[norm] = one_bit[norm].view(BF16)
    gaps = "model.layers.0.mlp.up_proj.weight:gaps"
    shifted = parts[gaps].clone()
    shifted[0] += 1
    return {
        "a base that differs by one bit in an element that does not change": (one_bit, parts),
        "values that were exchanged": (kept, {**parts, values: parts[values].flip(0)}),
        "positions that are one too large": (kept, {**parts, gaps: shifted}),
        "a tensor that did not come": (kept, {name: part for name, part in parts.items() if "up_proj" not in name}),
        "the delta of another step": (kept, delta(*versions[1:3])),
        "two steps, the second first": (versions[2], parts),
    }


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
@pytest.mark.parametrize("number", range(6))
def test_a_fault_is_found_by_the_digest_and_leaves_the_old_weights_and_no_base(
    start: Any, number: int, architecture: str
) -> None:
    model, versions = start(architecture)
    before, (kept, parts) = served(model), list(faults(versions).values())[number]
    model.kept.tensors = {name: tensor.clone() for name, tensor in kept.items()}  # its digest is that of the first
    digests = [weights_digest(version) for version in versions]
    with pytest.raises(EngineError, match=r"digest|the delta"):
        model.replace(parts, digests[1], digests[0])
    assert served(model) == before
    assert model.kept.digest is None
    with pytest.raises(EngineError, match="a whole version"):
        model.replace(delta(*versions[:2]), digests[1], digests[0])
    model.replace(versions[1], digests[1])
    model.replace(delta(*versions[1:3]), digests[2], digests[1])
    whole = LoadedModel(model.options)
    whole.replace(versions[2])
    assert served(model) == served(whole)


def test_a_delta_that_comes_twice_or_early_is_refused_by_its_base_and_costs_nothing(start: Any) -> None:
    model, versions = start()
    digests = [weights_digest(version) for version in versions]
    parts = delta(*versions[:2])
    model.replace(parts, digests[1], digests[0])
    after = served(model)
    for late_or_early, digest, base in (
        (parts, digests[1], digests[0]),
        (delta(*versions[2:4]), digests[3], digests[2]),
    ):
        with pytest.raises(EngineError, match="the delta is of the version"):
            model.replace(late_or_early, digest, base)
        assert (served(model), model.kept.digest) == (after, digests[1])
    model.replace(delta(*versions[1:3]), digests[2], digests[1])


def test_weights_that_come_without_a_digest_or_do_not_fit_leave_no_base(
    start: Any, model_folder: Callable[..., str]
) -> None:
    model, versions = start()
    model.replace(versions[1])
    assert model.kept.digest is None
    model, versions = start()
    model.replace(model_folder("qwen3", 1))
    assert model.kept.digest is None
    model, versions = start()
    before, short = served(model), dict(list(versions[1].items())[:-1])
    with pytest.raises(EngineError, match="missing"):
        model.replace(short, weights_digest(short))
    assert (served(model), model.kept.digest) == (before, None)


# -- folders -------------------------------------------------------------------------------------------


def write(folder: Path, name: str, tensors: Weights, digest: str, base: tuple[str, str] | None) -> Path:
    target = folder / name
    target.mkdir()
    save_file(tensors, target / "model-00001.safetensors")
    (target / CONTENTS).write_text(json.dumps({"digest": digest, "base": base}))
    return target


@pytest.fixture
def chain(start: Any, tmp_path: Path) -> tuple[LoadedModel, list[Weights], list[Path]]:
    """An engine that has none of them, versions, and their folders: the first is whole."""
    model, versions = start()
    digests = [weights_digest(version) for version in versions]
    folders = [write(tmp_path, "v000000", versions[0], digests[0], None)]
    for number in range(1, 5):
        parts = delta(versions[number - 1], versions[number])
        base = (folders[-1].name, digests[number - 1])
        folders.append(write(tmp_path, f"v{number:06d}", parts, digests[number], base))
    model.kept.forget()
    return model, versions, folders


def test_an_engine_reads_the_folders_that_it_lacks(chain: Any) -> None:
    model, versions, folders = chain
    whole = LoadedModel(model.options)
    for number in (1, 3, 3, 4):  # joins at 1, lacks two at 3, is asked for 3 once more, lacks one
        if number == 3:
            (folders[1] / CONTENTS).unlink(missing_ok=True)  # nothing before 2 is read any more
        model.replace(str(folders[number]))
        whole.replace(versions[number])
        assert served(model) == served(whole)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda folders: (folders[1] / CONTENTS).unlink(), "a folder that a delta builds on is missing"),
        (lambda folders: (folders[1] / CONTENTS).write_text("{}"), "not the contents"),
        (lambda folders: (folders[1] / CONTENTS).write_text('{"digest": "a", "base": ["../v0", "b"]}'), "not the cont"),
        (lambda folders: (folders[1] / "model-00001.safetensors").write_bytes(b"half"), "cannot be read"),
        (lambda folders: (folders[0] / "model-00001.safetensors").unlink(), "digest"),
    ],
)
def test_a_chain_that_is_not_whole_is_refused(chain: Any, spoil: Callable[[list[Path]], object], what: str) -> None:
    model, _, folders = chain
    before = served(model)
    spoil(folders)
    with pytest.raises(EngineError, match=what):
        model.replace(str(folders[3]))
    assert served(model) == before


def test_a_folder_that_is_its_own_base_ends_nobody(chain: Any) -> None:
    model, _, folders = chain
    (folders[1] / CONTENTS).write_text(json.dumps({"digest": "a", "base": ["v000001", "b"]}))
    assert read_contents(folders[1]) is not None
    with pytest.raises(EngineError, match="builds on"):
        model.replace(str(folders[1]))


def test_a_source_and_an_engine_agree_about_digests(start: Any) -> None:
    model, versions = start()
    assert DeltaSource().advance([versions[0]]).digest == model.kept.digest
