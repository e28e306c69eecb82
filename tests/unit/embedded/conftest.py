"""Schedulers over tiny models, and the reference they are compared with: plain forward passes of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.embedded.fallback import FallbackDecoder
from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.launcher import EmbeddedEngine, launch
from buffer_rl.embedded.sampling import SamplingParams
from buffer_rl.embedded.scheduler import Request, Scheduler
from buffer_rl.engines.control import EngineControlClient
from harness.engine_fixtures import engine_args as engine_args
from harness.engine_fixtures import model_folder as model_folder
from harness.engine_fixtures import one_thread as one_thread


@pytest.fixture(scope="session")
def module(model_folder: Callable[..., str]) -> Callable[..., Any]:
    """The transformers module of a tiny model."""
    loaded: dict[tuple[str, int], Any] = {}

    def load(architecture: str = "qwen3", seed: int = 0) -> Any:
        key = (architecture, seed)
        if key not in loaded:
            folder = model_folder(architecture, seed)
            loaded[key] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return loaded[key]

    return load


@pytest.fixture
def make_scheduler(module: Callable[..., Any]) -> Callable[..., Scheduler]:
    """A scheduler over a tiny model, with the decoder that the server would choose, or the fallback."""

    def make(
        architecture: str = "qwen3",
        *,
        deterministic: bool = False,
        fallback: bool = False,
        running: int = 16,
        **more: Any,
    ) -> Scheduler:
        model = module(architecture)
        use_fast = FastDecoder.supports(model.config) and not fallback
        decoder: FastDecoder | FallbackDecoder
        if use_fast:
            decoder = FastDecoder(model, 512, deterministic=deterministic)
        else:
            decoder = FallbackDecoder(model, 512, deterministic=deterministic, check=False)  # test_decode_check does
        return Scheduler(decoder, max_running_requests=running, **more)

    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """A request that ignores end tokens unless told otherwise."""

    def make(rid: str, prompt: list[int] | tuple[int, ...], *, seed: int = 0, **params: Any) -> Request:
        own = SamplingParams(**{"ignore_eos": True, **params})
        return Request(rid=rid, prompt_ids=tuple(prompt), params=own, seed=seed)

    return make


@pytest.fixture
def random_prompt() -> Callable[[random.Random, int], tuple[int, ...]]:
    """A prompt of the tiny tokenizer's ordinary characters."""

    def make(rng: random.Random, length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 99) for _ in range(length))

    return make


@pytest.fixture
def run() -> Callable[[Scheduler], list[Request]]:
    """Step until nothing is left; the finished requests in order of finishing."""

    def drain(scheduler: Scheduler) -> list[Request]:
        finished: list[Request] = []
        for _ in range(5000):
            if not scheduler.has_work:
                return finished
            finished += scheduler.step()
        raise AssertionError("the scheduler does not come to an end")

    return drain


@pytest.fixture
def reference_log_probs() -> Callable[..., list[float]]:
    """log_softmax(logits / temperature) of the output tokens, from one full forward pass of transformers."""

    @torch.no_grad()
    def compute(module: Any, request: Request, temperature: float) -> list[float]:
        ids = torch.tensor([[*request.prompt_ids, *request.output_ids]])
        logits = module(ids).logits[0].double() / temperature
        rows = torch.log_softmax(logits, dim=-1)[len(request.prompt_ids) - 1 : -1]
        return [float(row[token]) for row, token in zip(rows, request.output_ids, strict=True)]

    return compute


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, engine_args: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[EmbeddedEngine]]:
    """Two engines with the options ``ENGINE_OPTIONS`` of the module."""
    logs, started = tmp_path_factory.mktemp("logs"), []
    try:
        for index in range(2):
            args = engine_args(**getattr(request.module, "ENGINE_OPTIONS", {}))
            started.append(launch(args, index, str(logs / f"{index}.log")))
        for engine in started:
            engine.wait_ready(120)
        yield started
    finally:
        for engine in started:
            engine.stop()


@pytest.fixture(scope="module")
def control(engines: list[EmbeddedEngine]) -> Iterator[EngineControlClient]:
    """The control calls to both."""
    with EngineControlClient([engine.url for engine in engines]) as client:
        yield client


@pytest.fixture
def served(control: EngineControlClient, model_folder: Callable[..., str]) -> EngineControlClient:
    """Both engines serve the weights of seed 0 as version 0, without a pause or an update under way."""
    control.resume()
    control.update_weights_from_disk(model_folder("qwen3"), 0)
    return control
