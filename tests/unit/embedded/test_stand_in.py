"""What the fake engine says of pauses and new weights, beside what the embedded engine says of the same calls.

``tests/conformance`` holds the embedded engine's answers against those of a SGLang server."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from buffer_rl.testing.fake_engine import FakeEngine

LONG = 400
LATENCY_S = 1.0
Answers = dict[str, Any]


class Server:
    """The calls to one engine."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self._session.post(self._url + path, json=body) as response:
            return response.status, await response.json(content_type=None) if path == "/generate" else None

    def start(self, rid: str) -> asyncio.Task[tuple[int, Any]]:
        params = {"max_new_tokens": LONG, "ignore_eos": True}
        body = {"rid": rid, "input_ids": [5, 6], "sampling_params": params, "return_logprob": True}
        return asyncio.create_task(self.post("/generate", **body))

    async def flush(self) -> int:
        return (await self.post("/flush_cache"))[0]

    async def started(self, rid: str) -> asyncio.Task[tuple[int, Any]]:
        """``start``, once the request holds the cache."""
        while True:
            task = self.start(rid)
            while not task.done():
                if await self.flush() != 200:
                    return task


async def published_in_mid_response(server: Server, mode: str, folders: list[str]) -> Answers:
    """What is said of a request that runs while new weights come, and of one that came in the pause."""
    running = await server.started("running")
    await server.post("/pause_generation", mode=mode)
    came = server.start("came")
    update = {"model_path": folders[1], "weight_version": "1", "flush_cache": mode == "retract"}
    said: Answers = {
        "flush": await server.flush(),
        "update": (await server.post("/update_weights_from_disk", **update))[0],
    }
    await server.post("/continue_generation")
    for name, task in (("running", running), ("came", came)):
        status, answer = await task
        spans, meta = answer["meta_info"]["weight_versions"], answer["meta_info"]
        joined = all(span["end"] == after["start"] for span, after in pairwise(spans))
        said[name] = {
            "status": status,
            "keys": sorted(meta),
            "versions": [span["version"] for span in spans],
            "spans tile": joined and spans[0]["start"] == 0 and spans[-1]["end"] == LONG,
            "finish": meta["finish_reason"],
            **{key: meta[key] for key in ("weight_version", "num_retractions", "completion_tokens", "id")},
        }
    await server.post("/update_weights_from_disk", model_path=folders[0], weight_version="0")
    return said


async def aborted_in_a_pause(server: Server, mode: str, folders: list[str]) -> Answers:
    """What is said of a request that ran, and one that came in the pause, which are aborted before its end."""
    running = await server.started("running")
    await server.post("/pause_generation", mode=mode)
    came = server.start("came")
    said = {"flush": await server.flush()}
    reasons = []
    for task in (running, came):
        while not task.done():  # one that is not there yet is not aborted
            await server.post("/abort_request", abort_all=True)
        status, answer = await task
        reasons.append((status, answer["meta_info"]["finish_reason"]["type"]))
    await server.post("/continue_generation")
    return {**said, "reasons": reasons}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("scene", [published_in_mid_response, aborted_in_a_pause])
async def test_the_fake_engine_answers_as_the_embedded_one(scene, mode, engines, model_folder):
    said = []
    fake = FakeEngine(respond=lambda ids, seed: [7] * (LONG + 1), latency=lambda body: LATENCY_S)
    async with aiohttp.ClientSession() as session:
        with fake:
            for url in (engines[0].url, fake.url):
                said.append(await scene(Server(session, url), mode, [model_folder("qwen3", seed) for seed in (0, 1)]))
    assert said[0] == said[1]
