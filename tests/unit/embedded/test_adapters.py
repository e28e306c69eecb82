"""Requests with adapters, beside others and without."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from buffer_rl.embedded.fallback import FallbackDecoder
from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.loader import LoadedModel, LoadOptions
from buffer_rl.embedded.scheduler import Scheduler
from buffer_rl.embedded.service import EngineService
from buffer_rl.engines.protocol import BadRequestError
from buffer_rl.errors import EngineError
from harness.adapters import with_random_adapter

PROMPTS = (1, 5, 17, 63)


def decoder_over(folder, *, fallback=False, deterministic=False):
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    if fallback or not FastDecoder.supports(module.config):
        return FallbackDecoder(module, 512, deterministic=deterministic, check=False)
    return FastDecoder(module, 512, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("architecture", "fallback", "targets"),
    [
        ("qwen3", False, "all-linear"),
        ("qwen2", False, "all-linear"),
        ("llama", False, ["v_proj", "up_proj"]),
        ("qwen3", True, "all-linear"),
        ("gemma3", True, ["q_proj", "down_proj"]),
    ],
)
def test_each_request_has_the_log_probs_of_its_own_adapter_beside_others(
    architecture, fallback, targets, deterministic, model_folder, tmp_path, make_request, random_prompt, run,
    reference_log_probs,
):  # fmt: skip
    folder = model_folder(architecture, 0)
    decoder = decoder_over(folder, fallback=fallback, deterministic=deterministic)
    scheduler = Scheduler(decoder, max_running_requests=16)
    modules = {"": AutoModelForCausalLM.from_pretrained(folder).eval()}
    for seed, name in enumerate(("a", "b")):
        modules[name] = with_random_adapter(folder, tmp_path / name, seed, targets=targets)
        scheduler.add_adapter(name, decoder.with_adapter(str(tmp_path / name)), name)
    rng = random.Random(1)
    for i, length in enumerate(PROMPTS):
        prompt = random_prompt(rng, length)
        for name in modules:
            request = make_request(f"{i}{name}", prompt, seed=i, max_new_tokens=30)
            request.adapter = name
            scheduler.add(request)
    finished = run(scheduler)
    assert len(finished) == 3 * len(PROMPTS)
    for request in finished:
        expected = reference_log_probs(modules[request.adapter], request, 1.0)
        assert request.log_probs == pytest.approx(expected, abs=1e-5)
        other = modules["a" if request.adapter != "a" else "b"]
        assert request.log_probs != pytest.approx(reference_log_probs(other, request, 1.0), abs=1e-2)
        assert request.version_spans() == [{"version": request.adapter or "0", "start": 0, "end": 30}]


def test_requests_that_run_over_a_new_adapter_end_under_their_own(
    model_folder, tmp_path, make_request, run, reference_log_probs
):
    folder = model_folder("qwen3", 0)
    decoder = decoder_over(folder)
    scheduler = Scheduler(decoder, max_running_requests=4)
    modules = [with_random_adapter(folder, tmp_path / str(seed), seed) for seed in (0, 1)]
    scheduler.add_adapter("v1", decoder.with_adapter(str(tmp_path / "0")), "1")
    running = make_request("r", (5, 6, 7), max_new_tokens=30)
    running.adapter = "v1"
    scheduler.add(running)
    for _ in range(5):
        scheduler.step()
    for mode in ("in_place", "retract"):
        scheduler.pause(mode)
        scheduler.add_adapter(f"v2 {mode}", decoder.with_adapter(str(tmp_path / "1")), "2")
        scheduler.resume()
        scheduler.step()
    with pytest.raises(EngineError, match="requests run with the adapter v1"):
        scheduler.remove_adapter("v1")
    run(scheduler)
    assert running.log_probs == pytest.approx(reference_log_probs(modules[0], running, 1.0), abs=1e-5)
    assert running.version_spans() == [{"version": "1", "start": 0, "end": 30}]
    scheduler.remove_adapter("v1")
    assert scheduler.adapters == ("v2 in_place", "v2 retract")


@pytest.mark.parametrize("fallback", [False, True])
def test_an_adapter_of_another_model_or_kind_is_refused(fallback, model_folder, tmp_path):
    folder = model_folder("qwen3", 0)
    decoder = decoder_over(folder, fallback=fallback)
    with_random_adapter(folder, tmp_path / "a", 0)
    path = tmp_path / "a" / "adapter_model.safetensors"
    whole = load_file(path)
    with pytest.raises(EngineError, match="cannot be read"):
        decoder.with_adapter(str(tmp_path / "none"))
    name = next(name for name in whole if "o_proj.lora_B" in name)
    save_file(whole | {name: whole[name][:-1].contiguous()}, path)
    with pytest.raises(EngineError, match=r"self_attn.o_proj is of another shape"):
        decoder.with_adapter(str(tmp_path / "a"))
    save_file({key.replace("layers.1.", "layers.7."): value for key, value in whole.items()}, path)
    with pytest.raises(EngineError, match=r"adapts not: model.layers.7"):
        decoder.with_adapter(str(tmp_path / "a"))
    save_file({key: value for key, value in whole.items() if key != name}, path)
    with pytest.raises(EngineError, match="cannot be read"):
        decoder.with_adapter(str(tmp_path / "a"))
    save_file(whole, path)
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    with pytest.raises(EngineError, match="no plain LoRA"):
        decoder.with_adapter(str(tmp_path / "a"))


async def test_an_adapter_that_a_request_runs_with_stays_and_later_requests_may_name_it(model_folder, tmp_path):
    folder = model_folder("qwen3", 0)
    with_random_adapter(folder, tmp_path, 0)
    model = LoadedModel(LoadOptions(model_path=folder))
    service = EngineService(model, None, max_running_requests=8, weight_version="0")
    service.start()
    ends = [asyncio.Event(), asyncio.Event()]
    body = {"input_ids": [3, 4], "lora_path": "one", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    try:
        await service.load_adapter("one", str(tmp_path), "9")
        await service.pause("in_place")
        calls = [await service.begin(body, ends[0].set)]
        with pytest.raises(EngineError, match="requests run with the adapter one"):
            await service.unload_adapter("one")
        calls += [await service.begin(body, ends[1].set)]
        await service.resume()
        await asyncio.wait_for(asyncio.gather(*(end.wait() for end in ends)), 60)
        assert [len(call.requests[0].output_ids) for call in calls] == [4, 4]
        await service.unload_adapter("one")
        with pytest.raises(BadRequestError, match="never been loaded: one"):
            await service.begin(body, ends[0].set)
    finally:
        service.stop()
