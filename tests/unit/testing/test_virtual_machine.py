"""Engines in virtual time, whose requests share a batch and whose processes share cores."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from buffer_rl.testing.virtual_machine import BatchingEngines, Machine
from buffer_rl.testing.virtual_time import VirtualRuntime


def run(runtime: VirtualRuntime, work: Coroutine[Any, Any, Any]) -> Any:
    return runtime.run(lambda: work, lambda error: None)


def engines(runtime: VirtualRuntime, **changes: Any) -> BatchingEngines:
    machine = Machine(runtime=runtime)
    given = {"decode": lambda n: 1.0 + n, "count": 1, "slots": 8, "host": machine.process(float), **changes}
    return BatchingEngines(machine=machine, **given)


def test_a_request_is_faster_once_another_one_has_ended() -> None:
    """Both decode 2 tokens in steps of 3 s, then one of them 3 more in steps of 2 s."""
    runtime = VirtualRuntime({})
    made = engines(runtime)
    ends: list[float] = []

    async def respond(tokens: int) -> None:
        await made.respond_all([tokens])
        ends.append(runtime.now())

    async def both() -> None:
        await asyncio.gather(respond(2), respond(5))

    run(runtime, both())
    assert ends == pytest.approx([6.0, 12.0])


def test_a_publication_stops_requests_and_they_go_on_with_the_new_version() -> None:
    runtime = VirtualRuntime({})
    made = engines(runtime, publish_s=5.0, pause_s=3.0)

    async def main() -> Any:
        running = asyncio.ensure_future(made.respond_all([4]))  # in steps of 2 s, without the pause from 2 to 5
        publishing = asyncio.ensure_future(made.publish(1))
        await runtime.loop.sleep_until(3.0)
        late = await made.respond_all([0.5])
        return await running, late, await publishing

    versions, late, _ = run(runtime, main())
    assert versions == [(0, 1)]
    assert late == [(1, 1)]  # it came in the pause
    assert made.engines[0].busy_s == pytest.approx(runtime.now() - 3.0)


def test_a_cancelled_request_leaves_the_batch() -> None:
    runtime = VirtualRuntime({})
    made = engines(runtime)

    async def main() -> float:
        other = asyncio.ensure_future(made.respond_all([100]))
        running = asyncio.ensure_future(made.respond_all([4]))
        await runtime.loop.sleep_until(3.0)  # one token of each
        other.cancel()
        await running
        return runtime.now()

    assert run(runtime, main()) == pytest.approx(3.0 + 3 * 2.0)


def test_other_work_on_the_machine_takes_its_share_of_the_cores() -> None:
    runtime = VirtualRuntime({})
    machine = Machine(runtime=runtime, cores=2, others=3.0)
    process = machine.process(float)

    async def main() -> None:
        await process.work(5.0)

    run(runtime, main())
    assert runtime.now() == pytest.approx(10.0)  # 4 processes on 2 cores
    assert machine.others_s == pytest.approx(3.0 * 0.5 * 10.0)
