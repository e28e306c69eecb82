"""Weights that are prepared beside those that serve: nothing of them is served before the swap, and then all."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.loader import LoadedModel, LoadOptions, Replacement, checksum_answer
from buffer_rl.embedded.service import EngineService
from buffer_rl.embedded.weight_groups import NICE, in_thread
from buffer_rl.errors import EngineError
from buffer_rl.weights.delta import encode, weights_digest
from harness.processes import holds_within

Weights = dict[str, torch.Tensor]
BF16 = torch.bfloat16
FAST, OTHER = ["qwen3", "qwen2", "llama"], ["gemma3"]
DEADLINE_S = 30.0


def read(path: str) -> Weights:
    return {name: tensor.to(BF16) for name, tensor in load_file(Path(path, "model.safetensors")).items()}


def stepped(weights: Weights, start: int) -> Weights:
    """Each eleventh element from ``start`` on is another one."""
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in found.values():
        tensor.view(-1)[start::11] += 0.5
    return found


def delta(before: Weights, after: Weights) -> Weights:
    return {part: value for name in after for part, value in encode(name, before[name], after[name]).items()}


def checksum(named: Any) -> str:
    return str(checksum_answer(named)["per_engine_checksum"])


def served(model: LoadedModel) -> str:
    return checksum(model.decoder.named_weights())


def served_whole(options: LoadOptions, weights: Mapping[str, torch.Tensor]) -> str:
    model = LoadedModel(options)
    model.replace(weights)
    return served(model)


@pytest.fixture
def start(model_folder: Callable[..., str]) -> Callable[..., tuple[LoadedModel, list[Weights]]]:
    """A model that keeps the first of three versions, and these."""

    def start_model(architecture: str = "qwen3") -> tuple[LoadedModel, list[Weights]]:
        path = model_folder(architecture)
        model, versions = LoadedModel(LoadOptions(model_path=path, dtype="bfloat16")), [read(path)]
        versions += [stepped(versions[0], 0)]
        versions += [stepped(versions[1], 5)]
        model.replace(versions[0], weights_digest(versions[0]))
        return model, versions

    return start_model


def prepared_in(form: str, model: LoadedModel, versions: list[Weights], folder: str) -> tuple[Replacement, Weights]:
    """A replacement, and the weights that it has."""
    first, second = versions[:2]
    if form == "folder":
        return model.replacement(folder, beside=model.serving()), read(folder)
    if form == "tensors":
        return model.replacement(dict(second), beside=model.serving()), second
    if form == "kept":
        return model.replacement(second, weights_digest(second), beside=model.serving()), second
    return model.replacement(
        delta(first, second), weights_digest(second), weights_digest(first), beside=model.serving()
    ), second


@pytest.mark.parametrize("form", ["folder", "tensors", "kept", "delta"])
@pytest.mark.parametrize("architecture", FAST + OTHER)
def test_what_is_prepared_serves_from_the_swap_on_and_not_before(
    start: Any, model_folder: Callable[..., str], architecture: str, form: str
) -> None:
    model, versions = start(architecture)
    before, copied = served(model), {name: x.clone() for name, x in model.decoder.named_weights()}
    replacement, weights = prepared_in(form, model, versions, model_folder(architecture, 1))
    assert served(model) == before
    replacement.serve()
    assert served(model) == served_whole(model.options, weights)
    assert (replacement.spare is not None) == (architecture in FAST)
    if isinstance(model.decoder, FastDecoder):  # what adapters are folded with
        assert all(torch.equal(norm, weights[name]) for name, norm in model.decoder._norms.items())
    if replacement.spare is not None:
        assert all(torch.equal(x, copied[name]) for name, x in replacement.spare.named_weights())
        replacement.spare.drop_weights()
        assert served(model) == served_whole(model.options, weights)


@pytest.mark.parametrize("prepares", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_a_delta_of_what_was_prepared_and_never_served_makes_a_whole_version(
    start: Any, architecture: str, prepares: bool
) -> None:
    model, versions = start(architecture)
    digests = [weights_digest(version) for version in versions]
    model.replacement(delta(*versions[:2]), digests[1], digests[0], beside=model.serving())
    assert model.kept.digest == digests[1]
    parts = delta(*versions[1:])
    if prepares:
        model.replacement(parts, digests[2], digests[1], beside=model.serving()).serve()
    else:
        model.replace(parts, digests[2], digests[1])
    assert served(model) == served_whole(model.options, versions[2])


def test_what_waits_for_the_pause_is_refused_once_another_version_is_kept(start: Any) -> None:
    model, versions = start("gemma3")
    digests, before = [weights_digest(version) for version in versions], served(model)
    first = model.replacement(versions[1], digests[1], beside=model.serving())
    second = model.replacement(versions[2], digests[2], beside=model.serving())
    with pytest.raises(EngineError, match="another version has been kept"):
        first.serve()
    assert served(model) == before
    second.serve()
    assert served(model) == served_whole(model.options, versions[2])


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
async def test_the_thread_that_prepares_yields_to_the_one_that_decodes() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = priority()
    assert await in_thread(priority) == own
    assert await in_thread(priority, yields=True) == min(own + NICE, 19)
    assert priority() == own


@pytest.fixture
async def service(model_folder: Callable[..., str]) -> AsyncIterator[EngineService]:
    model = LoadedModel(LoadOptions(model_path=model_folder("qwen3"), dtype="bfloat16"))
    found = EngineService(model, None, max_running_requests=8, weight_version="0")
    found.start()
    yield found
    found.stop()


async def test_the_weights_that_served_are_freed_when_the_pause_ends(
    service: EngineService, model_folder: Callable[..., str]
) -> None:
    decoder = service.model.decoder
    assert isinstance(decoder, FastDecoder)
    old = weakref.ref(decoder.layers[0].down)
    await service.prepare_weight_update(model_folder("qwen3", 1), None, "7")
    assert service.scheduler.version == "0"
    await service.pause("retract")
    await service.end_weight_update()
    assert (service.scheduler.version, service.model_path) == ("7", model_folder("qwen3", 1))
    assert old() is not None
    await service.resume()
    assert await asyncio.to_thread(holds_within, DEADLINE_S, lambda: old() is None)


async def test_an_engine_that_is_not_paused_frees_them_at_once(
    service: EngineService, model_folder: Callable[..., str]
) -> None:
    decoder = service.model.decoder
    assert isinstance(decoder, FastDecoder)
    old = weakref.ref(decoder.layers[0].down)
    await service.prepare_weight_update(model_folder("qwen3", 1), None, "7")
    await service.end_weight_update()
    assert await asyncio.to_thread(holds_within, DEADLINE_S, lambda: old() is None)


async def test_of_an_update_that_is_being_prepared_no_part_comes_and_no_end_and_requests_are_answered(
    service: EngineService, model_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on, replacement = threading.Event(), threading.Event(), service.model.replacement

    def slow(*arguments: Any) -> Replacement:
        began.set()
        assert goes_on.wait(DEADLINE_S)
        return replacement(*arguments)

    monkeypatch.setattr(service.model, "replacement", slow)
    preparing = asyncio.ensure_future(service.prepare_weight_update(model_folder("qwen3", 1), None, "7"))
    assert await asyncio.to_thread(began.wait, DEADLINE_S)
    done = asyncio.Event()
    request = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    call = await service.begin(request, done.set)
    await asyncio.wait_for(done.wait(), DEADLINE_S)
    meta = service.answers(call)[0]["meta_info"]
    assert (meta["completion_tokens"], meta["weight_version"], preparing.done()) == (4, "0", False)
    with pytest.raises(EngineError, match="no weight update is under way"):
        service.staged.require(["model.norm.weight"])
    with pytest.raises(EngineError, match="no weight update is under way"):
        await service.end_weight_update()
    service.staged.begin()
    goes_on.set()
    with pytest.raises(EngineError, match="begun again"):
        await preparing
    service.staged.require(())  # the update that was begun since is still under way
    with pytest.raises(EngineError, match="missing"):
        await service.end_weight_update()
    assert service.scheduler.version == "0"


@pytest.mark.parametrize("ends", ["resume", "begin", "folder"])
async def test_what_was_prepared_and_not_ended_is_forgotten(
    service: EngineService, model_folder: Callable[..., str], ends: str
) -> None:
    before = served(service.model)
    await service.prepare_weight_update(model_folder("qwen3", 1), None, "7")
    await service.pause("retract")
    if ends == "resume":
        await service.resume()
    elif ends == "begin":
        service.staged.begin()
    else:
        await service.update_weights(model_folder("qwen3"), "0", flush_cache=True, abort_all=False)
    with pytest.raises(EngineError, match=r"no weight update is under way|weights are missing"):
        await service.end_weight_update()
    assert (service.scheduler.version, service.model_path) == ("0", model_folder("qwen3"))
    if ends != "folder":
        assert served(service.model) == before


async def test_a_delta_without_a_digest_and_released_memory_are_refused_before_anything_is_prepared(
    service: EngineService, model_folder: Callable[..., str]
) -> None:
    service.staged.begin(base="of a version")
    with pytest.raises(EngineError, match="a delta was staged"):
        await service.prepare_weight_update(None, None, "7")
    with pytest.raises(EngineError, match="no weight update is under way"):
        await service.prepare_weight_update(None, None, "7")
    await service.pause("retract")
    await service.release_memory(["weights"])
    with pytest.raises(EngineError, match="memory of the weights was released"):
        await service.prepare_weight_update(model_folder("qwen3", 1), None, "7")
    await service.resume_memory(["weights"])
    await service.prepare_weight_update(model_folder("qwen3", 1), None, "7")
    await service.end_weight_update()
    assert service.scheduler.lacks == set()
    assert served(service.model) == served_whole(service.model.options, read(model_folder("qwen3", 1)))
