"""The engine behaving as SGLang, beyond the cases of the conformance suite: deaths, hangs, seeds, a queue."""

from __future__ import annotations

import asyncio
import os
import signal

import aiohttp
import pytest

from buffer_rl.errors import EngineError
from harness.sglang_service import launch_imitating_sglang

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(engine_args, tmp_path_factory):
    """``start(**options)``: an engine that behaves as SGLang."""
    started, logs = [], tmp_path_factory.mktemp("logs")

    def make(**options):
        options = {"deterministic": False, **options}
        engine = launch_imitating_sglang(engine_args(**options), 0, str(logs / f"{len(started)}.log"))
        started.append(engine)
        engine.wait_ready(120)
        return engine

    yield make
    for engine in started:
        engine.stop()


@pytest.fixture(scope="module")
def engine(start):
    """One for the tests that leave it as it was."""
    return start()


@pytest.fixture
async def session():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as own:
        yield own


async def until_gone(engine):
    async with asyncio.timeout(30):
        while True:
            engine.check()
            await asyncio.sleep(0.01)


async def generate(session, engine, ids, rid=None, **params):
    body = {"input_ids": ids, "sampling_params": {"ignore_eos": True, **params}, **({"rid": rid} if rid else {})}
    async with session.post(f"{engine.url}/generate", json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("body", [{"input_ids": [10**9]}, {"input_ids": [5, -1]}, {"text": ""}])
async def test_a_token_that_is_not_there_and_an_empty_text_end_the_server(session, start, body):
    engine = start()
    with pytest.raises(aiohttp.ClientError):
        await session.post(f"{engine.url}/generate", json=body)
    with pytest.raises(EngineError, match="as SGLang, the server ends"):
        await until_gone(engine)


async def test_a_stopped_scheduler_shows_in_server_info_and_not_in_health(session, engine):
    os.kill(engine.process.pid, signal.SIGUSR1)
    waiting = asyncio.create_task(session.get(f"{engine.url}/server_info"))
    for path in ("health", "ready", "model_info"):
        async with session.get(f"{engine.url}/{path}") as response:
            assert response.status == 200
    assert not waiting.done()
    os.kill(engine.process.pid, signal.SIGUSR1)
    assert (await waiting).status == 200


async def test_a_seed_reproduces_nothing_unless_the_engine_is_deterministic_and_then_rows_share_it(
    session, engine, start
):
    params = {"temperature": 2.0, "max_new_tokens": 24, "sampling_seed": 3}
    (_, first), (_, again) = [await generate(session, engine, [5, 6, 7], **params) for _ in range(2)]
    assert first["output_ids"] != again["output_ids"]
    engine = start(deterministic=True)
    ids: list[list[int]] = [[5, 6, 7], [5, 6, 7], []]  # an empty prompt is answered as its neighbour
    (_, rows), (_, again) = [await generate(session, engine, ids, "r", **params) for _ in range(2)]
    assert [row["output_ids"] for row in (*rows, *again)] == [rows[0]["output_ids"]] * 6


async def test_what_is_aborted_in_the_queue_knows_little_of_itself(session, start):
    engine = start(engine_max_running_requests=1)
    body = {"input_ids": [[5, 6]] * 8, "stream": True, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    async with session.post(f"{engine.url}/generate", json=body) as running:
        await running.content.readline()
        queued = asyncio.create_task(generate(session, engine, [8], "q", max_new_tokens=4))
        async with asyncio.timeout(30):
            while not queued.done():
                await session.post(f"{engine.url}/abort_request", json={"rid": "q"})
        running.close()
    status, answer = await queued
    meta = answer["meta_info"]
    assert (status, answer["output_ids"], set(meta["finish_reason"])) == (200, [], {"type", "message"})
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 0}]
    assert not {"cached_tokens", "prompt_tokens", "num_retractions"} & set(meta)


async def test_samples_cannot_be_aborted_by_the_id_of_their_request(session, engine):
    task = asyncio.create_task(generate(session, engine, [5, 6], "own", n=2, max_new_tokens=300))
    while not task.done():
        await session.post(f"{engine.url}/abort_request", json={"rid": "own"})
    _, rows = await task
    assert [row["meta_info"]["finish_reason"]["type"] for row in rows] == ["length", "length"]
    assert not any(row["meta_info"]["id"].startswith("own") for row in rows)
