"""OpenAI's endpoints beyond single answers, which the conformance suite checks: clients that go away, and metrics."""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import pytest

from buffer_rl.embedded.launcher import launch

LONG = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(engine_args, tmp_path_factory):
    engine = launch(engine_args(), 0, str(tmp_path_factory.mktemp("logs") / "log"))
    try:
        engine.wait_ready(120)
        yield engine.url
    finally:
        engine.stop()


@pytest.fixture
async def session():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as own:
        yield own


async def metrics(session, url):
    """Prometheus' samples by name, without "sglang:"."""
    async with session.get(f"{url}/metrics") as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    return {name: float(value) for name, value in re.findall(r'^sglang:(\w+)\{model_name="[^"]+"\} (\S+)$', text, re.M)}


async def until(session, url, condition):
    async with asyncio.timeout(30):
        while True:
            if condition(found := await metrics(session, url)):
                return found
            await asyncio.sleep(0.01)


async def test_a_client_that_goes_away_in_mid_stream_ends_its_request(session, url):
    before = await metrics(session, url)
    async with session.post(f"{url}/v1/completions", json={**LONG, "stream": True}) as response:
        async for line in response.content:
            if b'"text":"' in line and b'"text":""' not in line:
                break
        response.close()
    after = await until(session, url, lambda found: found["num_requests_total"] > before["num_requests_total"])
    assert after["num_aborted_requests_total"] == before["num_aborted_requests_total"] + 1
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 400
    assert after["num_running_reqs"] == 0


async def test_a_client_that_goes_away_before_the_whole_answer_ends_its_request(session, url):
    before = await metrics(session, url)
    task = asyncio.create_task(session.post(f"{url}/v1/completions", json=LONG))
    await until(session, url, lambda found: found["num_running_reqs"] == 1)
    task.cancel()
    after = await until(session, url, lambda found: found["num_requests_total"] > before["num_requests_total"])
    assert after["num_aborted_requests_total"] == before["num_aborted_requests_total"] + 1


async def test_a_client_of_generate_that_goes_away_in_mid_stream_ends_its_request(session, url):
    before = await metrics(session, url)
    body = {"input_ids": [5, 6], "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    async with session.post(f"{url}/generate", json=body) as response:
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))
        response.close()
    assert 0 < len(first["output_ids"]) < 400
    assert (first["meta_info"]["finish_reason"], first["index"]) == (None, 0)
    after = await until(session, url, lambda found: found["num_requests_total"] > before["num_requests_total"])
    assert after["num_aborted_requests_total"] == before["num_aborted_requests_total"] + 1


async def test_metrics_count_what_was_answered(session, url):
    before = await metrics(session, url)
    body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200
    after = await metrics(session, url)
    grown = {name: after[name] - before[name] for name in after}
    assert (grown["num_requests_total"], grown["prompt_tokens_total"], grown["generation_tokens_total"]) == (2, 5, 8)
    assert (grown["num_aborted_requests_total"], after["num_queue_reqs"]) == (0, 0)
    assert after["gen_throughput"] > 0
    assert grown["e2e_request_latency_seconds_sum"] > 0


async def test_a_model_without_a_chat_template_says_so(session, url):
    async with session.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}) as got:
        error = await got.json()
    assert (got.status, error["object"], error["code"], error["type"]) == (400, "error", 400, "BadRequestError")
    assert "chat_template" in error["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": True},
        {"logprobs": 1.5},
        {"max_tokens": "4"},
        {"logit_bias": {"5": 1}},
        {"frequency_penalty": 1},
        {"response_format": {"type": "json_object"}},
        {"prompt": {}},
        {"stream": True, "echo": True},
    ],
)
async def test_what_is_wrong_or_not_there_is_refused(session, url, more):
    async with session.post(f"{url}/v1/completions", json={"prompt": "ab", **more}) as got:
        assert (got.status, (await got.json())["object"]) == (400, "error")
