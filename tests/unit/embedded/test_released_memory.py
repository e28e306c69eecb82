"""Memory that an engine frees and takes back: what is freed, what waits, and that tokens are the same afterwards."""

from __future__ import annotations

import gc
import json
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest

from buffer_rl.embedded.fallback import FallbackDecoder
from buffer_rl.embedded.launcher import EmbeddedEngine
from buffer_rl.embedded.loader import LoadedModel, LoadOptions, checksum_answer
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.errors import EngineError
from harness.processes import holds_within

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
CACHE = ["kv_cache", "cuda_graph"]
PROMPT = [5, 6, 7]


@pytest.fixture
def engine(engines: list[EmbeddedEngine], served: EngineControlClient) -> Iterator[EmbeddedEngine]:
    """The weights of seed 0, and nothing released; the other engine of the module is left alone."""
    yield engines[0]
    found = call(engines[0], "GET", "/server_info")[1]["lacks"]
    if back := [tag for tag in found if tag != "new weights"]:
        assert post(engines[0], RESUME, tags=back)[0] == 200


def call(engine: EmbeddedEngine, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(engine.url + path, data, method=method), timeout=60
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def post(engine: EmbeddedEngine, path: str, **body: Any) -> tuple[int, Any]:
    return call(engine, "POST", path, body)


def state(engine: EmbeddedEngine) -> tuple[list[str], int]:
    """What it lacks, and the bytes of its cache."""
    info = call(engine, "GET", "/server_info")[1]
    return info["lacks"], info["cache_bytes"]


def generate(engine: EmbeddedEngine) -> tuple[list[int], list[float]]:
    params = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 20, "ignore_eos": True}
    status, answer = post(engine, "/generate", input_ids=PROMPT, sampling_params=params, return_logprob=True)
    assert status == 200
    return answer["output_ids"], [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]


def update(engine: EmbeddedEngine, folder: str) -> tuple[int, Any]:
    body = {"model_path": folder, "weight_version": "0"}
    try:
        return post(engine, "/update_weights_from_disk", **body)
    except KeyError:  # the shape of a failed update
        return 400, ""


def test_the_cache_is_freed_and_tokens_are_the_same_afterwards(engine: EmbeddedEngine) -> None:
    before = generate(engine)
    lacks, num_bytes = state(engine)
    # keys and values of 3 positions in 2 layers with 2 heads of 16, and 128 logits, all float32; and a pool
    assert lacks == []
    assert num_bytes >= (2 * 3 * 2 * 2 * 16 + 128) * 4
    assert post(engine, RELEASE, tags=CACHE) == (200, None)
    assert state(engine) == (sorted(CACHE), 0)
    assert post(engine, RESUME, tags=CACHE) == (200, None)
    assert state(engine) == ([], 0)
    assert generate(engine) == before


def test_requests_wait_until_the_cache_is_back_and_new_weights_have_come(
    engine: EmbeddedEngine, model_folder: Callable[..., str]
) -> None:
    before = generate(engine)
    assert post(engine, RELEASE) == (200, None)  # all of it
    assert state(engine) == (["cuda_graph", "kv_cache", "weights"], 0)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(generate(engine)))
    asking.start()

    def waits() -> bool:
        info = call(engine, "GET", "/server_info")[1]
        return (info["num_waiting_requests"], info["num_running_requests"], answers) == (1, 0, [])

    assert holds_within(30, waits)
    assert post(engine, RESUME, tags=["weights"]) == (200, None)
    assert state(engine) == (["cuda_graph", "kv_cache", "new weights"], 0)
    assert update(engine, model_folder("qwen3"))[0] == 200
    assert waits()
    assert post(engine, RESUME, tags=CACHE) == (200, None)
    asking.join(60)
    assert answers == [before]


def test_the_cache_alone_does_not_serve_weights_that_are_gone(
    engine: EmbeddedEngine, model_folder: Callable[..., str]
) -> None:
    assert post(engine, RELEASE) == (200, None)
    assert post(engine, RESUME) == (200, None)
    assert state(engine) == (["new weights"], 0)
    assert update(engine, model_folder("qwen3", 1))[0] == 200
    changed = generate(engine)
    assert update(engine, model_folder("qwen3"))[0] == 200
    assert changed != generate(engine)


def test_what_would_end_a_sglang_server_is_refused(engine: EmbeddedEngine, model_folder: Callable[..., str]) -> None:
    assert post(engine, RESUME, tags=["weights"]) == (
        400,
        "not released: weights\n  hint: /release_memory_occupation first",
    )
    assert post(engine, RELEASE, tags=["weight"])[0] == 400
    assert post(engine, "/pause_generation", mode="in_place")[0] == 200
    params = {"max_new_tokens": 400, "ignore_eos": True}
    asking = threading.Thread(target=lambda: post(engine, "/generate", input_ids=PROMPT, sampling_params=params))
    asking.start()

    def count(name: str) -> int:
        return int(call(engine, "GET", "/server_info")[1][name])

    assert holds_within(30, lambda: count("num_waiting_requests") == 1)
    while not count("num_running_requests"):
        post(engine, "/continue_generation")
        post(engine, "/pause_generation", mode="in_place")
    status, message = post(engine, RELEASE)
    assert (status, message.splitlines()[0]) == (400, "requests hold the memory")
    assert state(engine)[0] == []
    assert post(engine, "/pause_generation", mode="retract")[0] == 200
    assert post(engine, RELEASE)[0] == 200
    assert update(engine, model_folder("qwen3"))[0] == 400  # there is no memory for them
    assert post(engine, RESUME)[0] == 200
    assert update(engine, model_folder("qwen3"))[0] == 200
    assert post(engine, "/continue_generation")[0] == 200
    asking.join(60)
    assert not asking.is_alive()


def parts_of(model: LoadedModel) -> list[Any]:
    """What the decoder computes with: prepared tensors, or the module of transformers."""
    if isinstance(decoder := model.decoder, FallbackDecoder):
        return [decoder.module]
    layers = [(each.qkv, each.out, each.gate_up, each.down) for each in decoder.layers]
    return [decoder.embed, decoder.head, *chain.from_iterable(layers)]


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_weights_that_were_dropped_are_freed_and_come_back_from_a_folder(
    architecture: str, model_folder: Callable[..., str]
) -> None:
    folder = model_folder(architecture)
    model = LoadedModel(LoadOptions(model_path=folder))
    expected = checksum_answer(model.decoder.named_weights())
    held = [weakref.ref(each) for each in parts_of(model)]
    model.decoder.drop_weights()
    gc.collect()
    assert len(held) == {"qwen3": 10, "gemma3": 1}[architecture]
    assert [one() for one in held if one() is not None] == []
    with pytest.raises(EngineError):
        model.replace(folder + "/nothing")
    model.replace(folder)
    assert checksum_answer(model.decoder.named_weights()) == expected
