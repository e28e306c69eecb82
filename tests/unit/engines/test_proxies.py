"""Every client of the run's servers, with proxies in the environment that nobody can reach."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.cluster.process import answers, reserved_port
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.external import ExternalEngine
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.engines.registry import EngineRegistry, EngineState, Replica
from buffer_rl.engines.supervisor import Heartbeat
from buffer_rl.testing.fake_engine import FakeEngine
from harness.processes import holds_within


@pytest.fixture(autouse=True)
def unreachable_proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A port of this machine that refuses connections."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with reserved_port("127.0.0.1") as held:
        for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
            for spelling in (name, name.upper()):
                monkeypatch.setenv(spelling, f"http://127.0.0.1:{held.getsockname()[1]}")
        yield


def test_the_router_and_requests_through_it_use_no_proxy(engine_args: Callable[..., Any], tmp_path: Path) -> None:
    with FakeEngine() as fake:
        fleet = EngineFleet(
            engine_args(engine_start_timeout_s=30.0), str(tmp_path), lambda *_: ExternalEngine(fake.url)
        )

        async def generated(client: EngineClient) -> Any:
            async with client:
                return (await client.agenerate("a", [5, 6], {"max_new_tokens": 3})).finish_reason

        with fleet:
            fleet.wait_ready()  # the router has asked the engine
            assert asyncio.run(generated(EngineClient(fleet.router_url, [fake.url])))


def test_control_calls_and_health_checks_use_no_proxy() -> None:
    with FakeEngine() as fake:
        assert answers(f"{fake.url}/health", 10.0)
        with EngineControlClient([fake.url], timeout_s=10.0) as control:
            assert list(control.versions()) == [fake.url]
        process: Any = SimpleNamespace(url=fake.url, check=lambda: None)
        replica = Replica(index=0, engine=process, state=EngineState.SUSPECT)
        heartbeat = Heartbeat(EngineRegistry(replicas=[replica]), 10.0)
        heartbeat.start()
        try:
            assert holds_within(10.0, lambda: replica.state is EngineState.SERVING)  # a probe was answered
        finally:
            heartbeat.stop()
