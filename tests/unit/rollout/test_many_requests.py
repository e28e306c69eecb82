"""Two thousand samples at once, from one rollout worker's code through the real router to two embedded engines."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.embedded.launcher import launch
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.tiny import make_tiny_model
from harness.processes import holds_within

GROUPS, SAMPLES, TOKENS = 125, 16, 24
MOST_GROWTH = 48 << 20
"""Bytes by which the client's process and each engine may grow; 13 to 16 MiB were measured."""


def status_bytes(pid: int | str, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) << 10


def num_waiting(url: str) -> int:
    with urllib.request.urlopen(f"{url}/server_info", timeout=10) as response:
        return int(json.loads(response.read())["num_waiting_requests"])


@pytest.mark.slow
async def test_two_thousand_samples_in_flight_end_without_an_error_and_in_bounded_memory(
    kit: Any, tmp_path: Path
) -> None:
    options = {
        "hf_checkpoint": make_tiny_model(tmp_path / "model", max_position_embeddings=64),
        "rollout_num_engines": 2,
        "engine_device": "cpu",
        "engine_auth": False,
        "rollout_batch_size": GROUPS,
        "rollout_max_response_len": TOKENS,
        "rollout_concurrency": 2048,
        "custom_rm_path": kit.user("length_async"),
    }
    args = kit.make_args(**options)
    groups = [kit.make_group(row, labels=["1"] * SAMPLES) for row in range(GROUPS)]
    buffer = FakeBuffer(groups, kit.make_ticket(GROUPS))
    with EngineFleet(args, str(tmp_path), launch) as fleet:
        fleet.wait_ready()
        urls = fleet.engine_urls
        client = EngineClient(fleet.router_url, urls)
        async with client, kit.opened(client, **options) as context:
            with EngineControlClient(urls) as control:
                await asyncio.to_thread(control.pause, "in_place")
                pids = ["self", *(engine.process.pid for engine in fleet.engines)]
                before = [status_bytes(pid, "VmRSS") for pid in pids]
                rollout = asyncio.create_task(DefaultRollout(context.args)(context.args, 0, buffer))
                waiting = [0, 0]

                def all_wait() -> bool:
                    waiting[:] = [num_waiting(url) for url in urls]
                    return sum(waiting) == GROUPS * SAMPLES

                assert await asyncio.to_thread(holds_within, 60, all_wait), waiting
                assert min(waiting) > 0
                await asyncio.to_thread(control.resume)
                await rollout
        after = [status_bytes(pid, "VmRSS") for pid in pids]
    assert len(buffer.finished) == GROUPS
    assert all(len(group.samples) == SAMPLES for group in buffer.finished)
    assert not buffer.rejected
    growth = [late - early for early, late in zip(before, after, strict=True)]
    assert max(growth) < MOST_GROWTH, [f"{each >> 20} MiB" for each in growth]
