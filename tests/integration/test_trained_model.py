"""The model that a run leaves behind, in plain transformers and in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffer_rl.engines.client import EngineClient, GenerateResult
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.plugin.registry import PluginRegistry

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

PROMPTS = ("ab=", "a=", "abcabc=", "cccc=", "bacb=", "=")
NEW_TOKENS = 24


def engine_answers(args: Any, run_dir: Path, prompts: list[list[int]]) -> list[GenerateResult]:
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS}

    async def ask(fleet: EngineFleet) -> list[GenerateResult]:
        async with EngineClient(fleet.router_url, fleet.engine_urls, timeout_s=60) as client:
            return await asyncio.gather(
                *(client.agenerate(f"r{number}", prompt, params) for number, prompt in enumerate(prompts))
            )

    with EngineFleet(args, str(run_dir), PluginRegistry()) as fleet:
        fleet.wait_ready()
        return asyncio.run(ask(fleet))


@pytest.mark.slow
def test_transformers_and_the_engine_continue_every_prompt_alike(
    train: Callable[[Any], Any], make_options: Callable[..., Any], tmp_path: Path
) -> None:
    args = make_options(num_rollout=2, eval_prompt_data=[], eval_interval=None)
    train(args)
    trained = Path(args.run_dir) / "hf"
    tokenizer = AutoTokenizer.from_pretrained(trained)
    model = AutoModelForCausalLM.from_pretrained(trained).eval()
    prompts = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in PROMPTS]
    answers = engine_answers(args.model_copy(update={"hf_checkpoint": str(trained)}), tmp_path / "engine", prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            whole = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)[0].tolist()
            logits = model(torch.tensor([prompt + answer.output_ids])).logits[0, len(prompt) - 1 : -1]
        assert answer.output_ids == whole[len(prompt) :]
        expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
        assert answer.log_probs == pytest.approx(expected.tolist(), abs=1e-5)
