"""Weights by tensor into real engines: two processes that read this one's memory, against the same weights by disk."""

from __future__ import annotations

import base64
import json
import os
import pickle
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.embedded.launcher import EmbeddedEngine
from buffer_rl.embedded.loader import LoadedModel, LoadOptions, checksum_answer
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.options.section import compose
from buffer_rl.testing.tiny import ARCHITECTURES
from buffer_rl.trainer.model import Model, weight_buckets
from buffer_rl.trainer.pretrained import load_model
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.publish import Publisher
from buffer_rl.weights.shared_bucket import SharedWeights, open_bucket
from buffer_rl.weights.shared_memory import NAME
from buffer_rl.weights.tensor import LOAD_FORMAT, TensorTransport
from harness.fake_roles import local_senders
from harness.trainers import make_trainer

TENSORS = "/update_weights_from_tensor"
PROMPT = [5, 6, 7]


def post(engine: EmbeddedEngine, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(engine.url + path, json.dumps(body).encode(), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def generate(engine: EmbeddedEngine) -> tuple[list[int], list[float]]:
    greedy = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    status, answer = post(engine, "/generate", input_ids=PROMPT, sampling_params=greedy, return_logprob=True)
    assert status == 200
    return answer["output_ids"], [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]


def weights_of(path: str) -> dict[str, torch.Tensor]:
    return dict(Model(load_model(path, torch.device("cpu"), "--hf-checkpoint")).weights())


def mapped(engine: EmbeddedEngine) -> bool:
    """Whether the engine's process still maps shared weights."""
    return NAME in Path(f"/proc/{engine.process.pid}/maps").read_text()


def test_tensors_and_disk_give_equal_checksums_tokens_and_log_probs(
    engines: list[EmbeddedEngine], served: EngineControlClient, model_folder: Callable[..., str], tmp_path: Path
) -> None:
    before = served.checksums()
    options = {"hf_checkpoint": model_folder("qwen3", 1), "train_device": "cpu", "rollout_num_engines": 2}
    args: Any = compose(CORE_SECTIONS)(run_dir=str(tmp_path), **options)
    trainer, found = make_trainer(args), []
    for version, transport in enumerate((DiskTransport, TensorTransport), start=1):
        served.update_weights_from_disk(model_folder("qwen3"), 0)
        assert served.checksums() == before
        senders = local_senders(transport, args, trainer.export)
        Publisher(transport(args), senders, served, compare=True).publish(version)
        assert set(served.versions().values()) == {str(version)}
        found.append((served.checksums(), [generate(engine) for engine in engines]))
    by_disk, by_tensor = found
    assert by_tensor == by_disk
    (checksum,) = set(by_tensor[0].values())
    assert checksum not in before.values()
    assert NAME not in " ".join(os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())
    assert not any(mapped(engine) for engine in engines)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture_takes_tensors_as_it_takes_a_folder(
    architecture: str, dtype: str, model_folder: Callable[..., str]
) -> None:
    new = model_folder(architecture, 1)
    shared = SharedWeights()
    handles = shared.share(weight_buckets(weights_of(new).items(), bucket_bytes=50_000))
    assert len(handles) > 1
    tensors = {name: tensor for (handle,) in handles for name, tensor in open_bucket(handle).items()}
    shared.release()
    checksums = []
    for replace in (lambda model: model.replace(new), lambda model: model.replace(tensors)):
        model = LoadedModel(LoadOptions(model_path=model_folder(architecture), dtype=dtype))
        old = checksum_answer(model.decoder.named_weights())
        replace(model)
        checksums.append(checksum_answer(model.decoder.named_weights()))
        assert checksums[-1]["per_engine_checksum"] != old["per_engine_checksum"]
    assert checksums[0] == checksums[1]


def test_a_single_changed_value_changes_the_checksum_and_names_the_tensor(model_folder: Callable[..., str]) -> None:
    model = LoadedModel(LoadOptions(model_path=model_folder("qwen3")))
    before = checksum_answer(model.decoder.named_weights())
    tensors = {name: tensor.clone() for name, tensor in weights_of(model_folder("qwen3")).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] += 1e-3
    model.replace(tensors)
    after = checksum_answer(model.decoder.named_weights())
    assert after["per_engine_checksum"] != before["per_engine_checksum"]
    old, new = before["ranks"][0]["checksums"], after["ranks"][0]["checksums"]
    assert [name for name in old if old[name] != new[name]] == ["layers.1.down"]


def without_one(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}


def reshaped(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**weights, "model.norm.weight": weights["model.norm.weight"][:-1]}


def with_a_stranger(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**weights, "model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_one, "weights are missing: model.norm.weight"),
        (reshaped, "weights are of the wrong shape: model.norm.weight"),
        (with_a_stranger, "weights are of another model: model.layers.7.mlp.up_proj.weight"),
    ],
)
def test_an_update_that_is_not_whole_is_refused_at_its_end_and_the_old_weights_serve(
    engines: list[EmbeddedEngine],
    served: EngineControlClient,
    model_folder: Callable[..., str],
    change: Callable[..., Any],
    message: str,
) -> None:
    engine, before, tokens = engines[0], served.checksums(), generate(engines[0])
    shared = SharedWeights()
    ((handle,),) = shared.share([change(weights_of(model_folder("qwen3", 1)))])
    assert post(engine, "/begin_weight_update", selector="all")[0] == 200
    update = {"serialized_named_tensors": [handle], "load_format": LOAD_FORMAT, "weight_version": "9"}
    assert post(engine, TENSORS, **update)[0] == 200
    assert served.checksums() == before, "staged weights are served"
    status, answer = post(engine, "/end_weight_update")
    assert (status, answer["success"]) == (400, False)
    assert message in answer["message"]
    assert (served.checksums(), generate(engine)) == (before, tokens)
    assert set(served.versions().values()) == {"0"}
    shared.release()
    assert not mapped(engine)


class Trap:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket", LOAD_FORMAT, "direct", 7])
def test_a_pickle_is_refused_and_not_executed(
    engines: list[EmbeddedEngine], served: EngineControlClient, tmp_path: Path, load_format: Any
) -> None:
    payload = base64.b64encode(pickle.dumps([("a", Trap(tmp_path / "trapped"))])).decode()
    assert post(engines[0], "/begin_weight_update")[0] == 200
    status, answer = post(engines[0], TENSORS, serialized_named_tensors=[payload], load_format=load_format)
    assert (status, answer["success"]) == (400, False)
    assert not (tmp_path / "trapped").exists()
    pickle.loads(base64.b64decode(payload))
    assert (tmp_path / "trapped").exists(), "the trap works"


def test_a_refused_part_ends_the_update(engines: list[EmbeddedEngine], served: EngineControlClient) -> None:
    post(engines[0], "/begin_weight_update")
    assert post(engines[0], TENSORS, serialized_named_tensors=["{}"], load_format=LOAD_FORMAT)[0] == 400
    status, answer = post(engines[0], "/end_weight_update")
    assert status == 400
    assert "no weight update is under way" in answer["message"]


def test_parts_without_a_begin_or_given_twice_are_refused(
    engines: list[EmbeddedEngine], served: EngineControlClient
) -> None:
    shared = SharedWeights()
    ((handle,),) = shared.share([{"a": torch.zeros(3)}])
    update: dict[str, Any] = {"serialized_named_tensors": [handle], "load_format": LOAD_FORMAT}
    assert "begin_weight_update first" in post(engines[0], TENSORS, **update)[1]["message"]
    post(engines[0], "/begin_weight_update")
    assert post(engines[0], TENSORS, **update)[0] == 200
    status, answer = post(engines[0], TENSORS, **update)
    assert (status, "came twice" in answer["message"]) == (400, True)
    shared.release()


def test_a_pause_that_ends_gives_up_an_unfinished_update(
    engines: list[EmbeddedEngine], served: EngineControlClient, model_folder: Callable[..., str]
) -> None:
    before = served.checksums()
    shared = SharedWeights()
    handles = shared.share(weight_buckets(weights_of(model_folder("qwen3", 1)).items(), bucket_bytes=100_000), 2)
    served.pause()
    served.begin_weight_update()
    own = {url: [handle] for url, handle in zip(served.targets(), handles[0], strict=True)}
    served.update_weights_from_tensor(own, LOAD_FORMAT, None)
    assert all(mapped(engine) for engine in engines)
    served.resume()
    shared.release()
    assert not any(mapped(engine) for engine in engines)
    assert post(engines[0], "/end_weight_update")[0] == 400
    assert served.checksums() == before


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"serialized_named_tensors": "{}"},
        {"serialized_named_tensors": []},
        {"serialized_named_tensors": [{}]},
        {"serialized_named_tensors": ["{}", "{}"]},
        {"serialized_named_tensors": [json.dumps({"kind": "memory", "where": None, "layout": None})]},
        {"serialized_named_tensors": ["{}"], "weight_version": 3},
    ],
)
def test_a_body_of_another_form_is_400(
    engines: list[EmbeddedEngine], served: EngineControlClient, body: dict[str, Any]
) -> None:
    post(engines[0], "/begin_weight_update")
    assert post(engines[0], TENSORS, **{"load_format": LOAD_FORMAT, **body})[0] == 400


def test_other_selectors_and_checks_are_400(engines: list[EmbeddedEngine], served: EngineControlClient) -> None:
    assert post(engines[0], "/begin_weight_update", selector="lora")[0] == 400
    assert post(engines[0], "/weights_checker", action="snapshot")[0] == 400
