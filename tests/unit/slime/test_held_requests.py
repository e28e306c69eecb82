"""Requests that a user's function sends to the run's router, while a publication waits for those that run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.protocol import Adapter
from buffer_rl.rollout.context import Places, RolloutContext
from buffer_rl.testing.fake_engine import FakeEngine
from buffer_rl_slime.http import post


async def test_a_request_is_held_back_and_names_the_adapter_as_those_of_the_run_do() -> None:
    body = {"input_ids": [1, 2], "sampling_params": {}, "return_logprob": True}
    with FakeEngine() as engine:
        args: Any = SimpleNamespace(router_url=engine.url, engine_urls=[], generate_timeout_s=60.0, engine_api_key=None)
        async with EngineClient(engine.url, [engine.url]) as client:
            none: Any = None
            context = RolloutContext(
                args=args,
                tokenizer=none,
                prompts=none,
                scorer=none,
                engine=client,
                places=Places(1),
                at_end=asyncio.Lock(),
                seed=0,
            )
            with context.active():
                await client.gate.close(1.0)
                asked = asyncio.create_task(post(f"{engine.url}/generate", body))
                await post(f"{engine.url}/flush_cache", {})  # not for a token: it does not wait
                assert engine.log.num_posts == 0
                client.gate.open()
                assert (await asked)["output_ids"] == [2, 1]
                client.adapter = Adapter("v3-a", 3)
                engine.adapters.append("v3-a")
                engine.version = 4
                answer = await post(f"{engine.url}/generate", body)
                assert engine.log.requests[-1]["lora_path"] == "v3-a"
                assert answer["meta_info"]["weight_versions"] == [{"version": "3", "start": 0, "end": 2}]
