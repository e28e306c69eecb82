"""An engine and a trainer, and requests that run over publications of adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.embedded.launcher import EmbeddedEngine, launch
from buffer_rl.engines.client import EngineClient, GenerateResult
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.protocol import Adapter
from buffer_rl.errors import EngineError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import VersionSpan
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.logprob_gate import batch_of
from buffer_rl.weights.adapters import AdapterCheck, AdapterTransport, tolerance
from buffer_rl.weights.publish import Publisher
from harness.recorded_rows import recorded_rows
from harness.trainers import make_trainer, step

pytestmark = pytest.mark.usefixtures("forked_processes")
STEPS = 6


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("run")
    model = make_tiny_model(folder / "model", characters="abcd=", init_scale=0.2)
    more: dict[str, Any] = {"lora_rank": 4, "lora_publish": "adapter", "lr": 1e-2, "schedule": "async"}
    return compose(CORE_SECTIONS)(
        hf_checkpoint=model, run_dir=str(folder), engine_device="cpu", train_device="cpu", max_staleness=2, **more
    )


@pytest.fixture(scope="module")
def engine(args: Any) -> Iterator[EmbeddedEngine]:
    started = launch(args, 0, str(Path(args.run_dir, "engine.log")))
    try:
        started.wait_ready(120)
        yield started
    finally:
        started.stop()


def reference(model: str, folder: Path, prompt: list[int], answer: GenerateResult) -> list[float]:
    load: Any = AutoModelForCausalLM.from_pretrained
    module = load(model, dtype=torch.float32)
    module.load_adapter(str(folder))
    with torch.no_grad():
        rows = module(torch.tensor([prompt + answer.output_ids])).logits[0].double().log_softmax(-1)
    drawn = rows[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(drawn, answer.output_ids, strict=True)]


async def test_requests_that_run_over_publications_end_under_the_adapter_of_the_trainer_that_they_began_with(
    args: Any, engine: EmbeddedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(args)

    def log_probs(model: str) -> Callable[..., Any]:
        return lambda many, num: trainer.log_probs(model, batch_of(many, num))

    params = {"max_new_tokens": 200, "temperature": 1.0, "ignore_eos": True}
    prompts = [[3 + i % 5, 4, 5] for i in range(STEPS)]
    async with EngineClient(engine.url, [engine.url]) as client:
        control = EngineControlClient([engine.url])
        transport = AdapterTransport(args, trainer.write_adapter, lambda adapter: setattr(client, "adapter", adapter))
        check = AdapterCheck(
            log_probs("actor"),
            log_probs("base"),
            lambda: transport.newest,
            temperature=1.0,
            max_diff=tolerance("float32", 2),
        )
        unused: Any = None
        told: list[str] = []
        publisher = Publisher(transport, unused, control, check=check, announce=transport.announce, notice=told.append)
        tasks: list[asyncio.Task[Any]] = []
        for version, prompt in enumerate(prompts):
            if version:
                step(trainer, recorded_rows(version, 3))
            trainer.write_adapter(str(tmp_path / str(version)))
            await asyncio.to_thread(publisher.publish, version)
            tasks += [asyncio.create_task(client.agenerate(f"{version}", prompt, params))]
            tasks += [asyncio.create_task(client.agenerate_rows(f"{version}-rows", prompt, 2, params))]
            await asyncio.sleep(0)
        answers = await asyncio.gather(*tasks)
        control.close()
    assert told == []  # no publication needed a second attempt
    for number, found in enumerate(answers):
        version = number // 2
        for answer in found if isinstance(found, list) else [found]:
            assert answer.spans == [VersionSpan(version, 0, 200)]
            expected = reference(args.hf_checkpoint, tmp_path / str(version), prompts[version], answer)
            assert answer.log_probs == pytest.approx(expected, abs=1e-5)


def test_an_engine_keeps_its_base_while_it_has_adapters(args: Any, engine: EmbeddedEngine, tmp_path: Path) -> None:
    trainer = make_trainer(args)
    trainer.write_adapter(str(tmp_path))
    with EngineControlClient([engine.url]) as control:
        control.load_adapter("one", str(tmp_path), 9)
        with pytest.raises(EngineError, match="already loaded"):
            control.load_adapter("one", str(tmp_path), 9)
        calls: list[Callable[[], None]] = [lambda: control.update_weights_from_disk(args.hf_checkpoint, 9)]
        for call in (*calls, control.release_memory):
            with pytest.raises(EngineError, match=r"adapters of these weights are loaded: .*one"):
                call()
        body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 1}}
        assert control.sample([engine.url], Adapter("one", 9).named_in(body))
        control.unload_adapter("one")
        with pytest.raises(EngineError, match="does not exist"):
            control.unload_adapter("one")
        with pytest.raises(EngineError, match="never been loaded: one"):
            control.sample([engine.url], Adapter("one", 9).named_in(body))
        with pytest.raises(EngineError, match="cannot be read"):
            control.load_adapter("two", str(tmp_path / "none"), 9)
