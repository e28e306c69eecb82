"""Weight updates of ``harness.sglang_service``: what a SGLang 0.5.23 server was measured to do."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from buffer_rl.embedded.launcher import EmbeddedEngine
from buffer_rl.embedded.loader import LoadedModel, LoadOptions, checksum_answer
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.weights.disk import COPIED
from buffer_rl.weights.distributed import LEAVE, join_group, receive_bucket
from buffer_rl.weights.process_group import Rendezvous, described
from buffer_rl.weights.shared_bucket import SharedWeights
from buffer_rl.weights.tensor import LOAD_FORMAT
from harness.sglang_service import launch_imitating_sglang

NORM = "model.norm.weight"
BAD_PART: dict[str, Any] = {"serialized_named_tensors": ["{}"], "load_format": LOAD_FORMAT}
OPEN = "a weight-update session is already open; call end_weight_update() first"


@pytest.fixture(scope="module")
def engine(engine_args: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    started = launch_imitating_sglang(engine_args(), 0, str(tmp_path_factory.mktemp("logs") / "0.log"))
    try:
        started.wait_ready(120)
        yield started
    finally:
        started.stop()


@pytest.fixture
def served(engine: EmbeddedEngine, model_folder: Callable[..., str]) -> Iterator[EngineControlClient]:
    """The weights of seed 0 as version 0, no session, no pause."""
    with EngineControlClient([engine.url]) as control:
        control.update_weights_from_disk(model_folder("qwen3"), 0)
        yield control
        control.resume()
        post(engine, "/end_weight_update")


def post(engine: EmbeddedEngine, path: str, **body: Any) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(engine.url + path, json.dumps(body).encode(), timeout=60) as answer:
            return answer.status, json.load(answer).get("message", "")
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["message"]


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder, "model.safetensors"))


def checksum_of(folder: str) -> str:
    model = LoadedModel(LoadOptions(model_path=folder))
    return str(checksum_answer(model.decoder.named_weights())["per_engine_checksum"])


def changed(folder: str, target: Path, tensors: dict[str, torch.Tensor]) -> str:
    """A folder with the configuration of ``folder`` and other tensors."""
    target.mkdir()
    for path in Path(folder).iterdir():
        if path.suffix in COPIED:
            (target / path.name).write_bytes(path.read_bytes())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def test_a_session_stays_open_until_its_end_and_a_second_one_is_refused(
    engine: EmbeddedEngine, served: EngineControlClient
) -> None:
    assert post(engine, "/begin_weight_update", selector="all")[0] == 200
    assert post(engine, "/begin_weight_update", selector="all") == (400, OPEN)
    served.pause()
    served.resume()
    assert post(engine, "/begin_weight_update", selector="all") == (400, OPEN)
    assert post(engine, "/update_weights_from_tensor", **BAD_PART)[0] == 400
    assert post(engine, "/begin_weight_update", selector="all") == (400, OPEN)
    assert post(engine, "/end_weight_update")[0] == 200
    assert post(engine, "/end_weight_update")[0] == 400
    assert post(engine, "/update_weights_from_tensor", **BAD_PART)[0] == 400


def test_each_bucket_is_served_at_once_under_the_version_that_the_first_call_names(
    served: EngineControlClient, model_folder: Callable[..., str], tmp_path: Path
) -> None:
    old, new = tensors_of(model_folder("qwen3")), tensors_of(model_folder("qwen3", 1))
    names = sorted(new)
    parts = [{name: new[name] for name in chosen} for chosen in (names[:4], names[4:])]
    half = changed(model_folder("qwen3"), tmp_path / "half", old | parts[0])
    shared = SharedWeights()
    (first,), (second,) = shared.share(parts)
    served.begin_weight_update()
    served.update_weights_from_tensor({served.targets()[0]: [first]}, LOAD_FORMAT, None)
    assert set(served.checksums().values()) == {checksum_of(half)}
    assert set(served.versions().values()) == {"0"}
    served.update_weights_from_tensor({served.targets()[0]: [second]}, LOAD_FORMAT, 7)
    assert set(served.versions().values()) == {"7"}, "before the end"
    assert set(served.checksums().values()) == {checksum_of(model_folder("qwen3", 1))}
    served.end_weight_update()
    shared.release()


def test_unknown_names_and_other_shapes_are_answered_with_success_and_change_nothing(
    served: EngineControlClient, model_folder: Callable[..., str]
) -> None:
    before = served.checksums()
    shared = SharedWeights()
    ((handle,),) = shared.share([{"a.stranger": torch.ones(2), NORM: torch.ones(3)}])
    served.begin_weight_update()
    served.update_weights_from_tensor({served.targets()[0]: [handle]}, LOAD_FORMAT, 7)
    served.end_weight_update()
    shared.release()
    assert served.checksums() == before
    assert set(served.versions().values()) == {"7"}


def test_broadcasts_of_any_name_are_received(served: EngineControlClient) -> None:
    before, bucket = served.checksums(), {"a.stranger": torch.ones(2)}
    served.begin_weight_update()
    rendezvous = Rendezvous()

    def send() -> None:
        group = rendezvous.group("strangers", 2)
        group.send(list(bucket.values()), 30.0)

    sender = threading.Thread(target=send)
    sender.start()
    join_group(served, rendezvous.address, rendezvous.port, dict.fromkeys(served.targets(), 1), name="strangers")
    receive_bucket(served, described(bucket), name="strangers", version=7)
    sender.join()
    served.post(LEAVE, {"group_name": "strangers"})
    served.end_weight_update()
    assert (served.checksums(), set(served.versions().values())) == (before, {"7"})


@pytest.mark.parametrize("change", ["a tensor is missing", "a tensor has another shape"])
def test_a_folder_that_does_not_fit_is_success_with_the_new_version(
    served: EngineControlClient, model_folder: Callable[..., str], tmp_path: Path, change: str
) -> None:
    new = tensors_of(model_folder("qwen3", 1))
    mixed = changed(model_folder("qwen3"), tmp_path / "mixed", new | {NORM: tensors_of(model_folder("qwen3"))[NORM]})
    del new[NORM]
    if "shape" in change:
        new[NORM] = torch.ones(3)
    served.update_weights_from_disk(changed(model_folder("qwen3"), tmp_path / "new", new), 8)
    assert set(served.versions().values()) == {"8"}
    assert set(served.checksums().values()) == {checksum_of(mixed)}
