"""Requests that are held back while others end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.http import RequestGate
from buffer_rl.errors import DeadlineError
from buffer_rl.rollout.worker import RolloutWorker
from buffer_rl.testing.fake_engine import FakeEngine, Fault
from harness.processes import holds_within

FOREVER = 3600.0


def client_of(engine, **more):
    return EngineClient(engine.url, [engine.url], **more)


def worker_of(client):
    worker = object.__new__(RolloutWorker)  # without buffer, functions and options, which these calls do not need
    worker._opened = SimpleNamespace(engine=client)
    return worker


async def arrived(engine, number):
    assert await asyncio.to_thread(holds_within, 60, lambda: engine.log.num_posts == number)


async def test_what_runs_ends_and_what_comes_waits():
    with FakeEngine(latency=lambda body: FOREVER if body["rid"] == "running" else 0.0, aborted_after=1) as engine:
        async with client_of(engine) as client:
            worker = worker_of(client)
            running = asyncio.create_task(client.agenerate("running", [1], {}))
            await arrived(engine, 1)
            held = asyncio.create_task(worker.hold(60.0))
            late = [asyncio.create_task(client.agenerate_rows(f"late{i}-", [2, 3], 2, {})) for i in range(3)]
            await asyncio.sleep(0)
            assert not held.done()
            await client.abort(["running"])
            await held
            assert running.done()
            assert engine.log.num_posts == 1
            await worker.unhold()
            assert [row.output_ids for rows in await asyncio.gather(*late) for row in rows] == [[3, 2]] * 6
            await worker.hold(60.0)  # nothing runs
            await worker.unhold()
            await worker.unhold()


async def test_a_worker_without_an_engine_has_nothing_to_hold():
    worker = worker_of(None)
    await worker.hold(0.0)
    await worker.unhold()


async def test_after_its_deadline_requests_are_sent_again():
    with FakeEngine(latency=lambda body: FOREVER if body["rid"] == "running" else 0.0) as engine:
        async with client_of(engine) as client:
            running = asyncio.create_task(client.agenerate("running", [1], {}))
            await arrived(engine, 1)
            with pytest.raises(DeadlineError, match=r"1 requests still run after 0\.05 s"):
                await worker_of(client).hold(0.05)
            assert (await client.agenerate("another", [2], {})).output_ids == [2]
            await client.abort(["running"])
            await running


async def test_a_hold_that_is_cancelled_leaves_nothing_held():
    with FakeEngine(latency=lambda body: FOREVER if body["rid"] == "running" else 0.0) as engine:
        async with client_of(engine) as client:
            running = asyncio.create_task(client.agenerate("running", [1], {}))
            await arrived(engine, 1)
            held = asyncio.create_task(worker_of(client).hold(60.0))
            await asyncio.sleep(0)
            held.cancel()
            await asyncio.wait([held])
            assert (await client.agenerate("another", [2], {})).output_ids == [2]
            await client.abort(["running"])
            await running


async def test_a_request_that_is_lost_is_sent_again_after_the_hold():
    faults = [Fault.RESET, None]
    with FakeEngine(latency=lambda body: FOREVER, fault=lambda body, number: faults[number]) as engine:
        async with client_of(engine) as client:
            asked = asyncio.create_task(client.agenerate("r", [1, 2], {}))
            await arrived(engine, 1)
            held = asyncio.create_task(client.gate.close(60.0))
            await asyncio.sleep(0)
            engine.latency = None
            engine.cut_connections()
            await held  # its engine is gone, and no other may answer it now
            assert engine.log.num_posts == 1
            client.gate.open()
            faults[1] = None
            assert (await asked).output_ids == [2, 1]
            assert engine.log.num_posts == 2


async def test_the_deadline_of_a_request_does_not_count_the_time_that_it_is_held():
    gate, loop = RequestGate(), asyncio.get_running_loop()
    await gate.close(1.0)
    async with asyncio.timeout(60.0) as limit:
        before, began = limit.when(), loop.time()
        loop.call_later(0.02, lambda: (seen.append(limit.when()), gate.open()))
        seen = []
        async with gate.passed(limit):
            assert limit.when() >= before + 0.02
            assert limit.when() <= before + loop.time() - began
        assert seen == [None]
