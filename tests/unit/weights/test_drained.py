"""Publications that wait for running requests, and the trial that says whether they have to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import EngineClient, GenerateResult
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.registry import EngineRegistry
from buffer_rl.errors import DeadlineError, EngineError, WorkerDiedError
from buffer_rl.options.section import compose
from buffer_rl.testing.fake_engine import FakeEngine
from buffer_rl.testing.faulty_server import Fault
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.publish import Publisher
from harness.fake_roles import FakeEngines, local_senders


def export() -> Iterator[dict[str, torch.Tensor]]:
    yield {"number": torch.tensor(1)}


def publisher(folder: Path, engines: Any, **options: Any) -> Publisher:
    args: Any = compose(CORE_SECTIONS)(run_dir=str(folder), hf_checkpoint=str(folder))
    trainer = local_senders(DiskTransport, args, export)
    return Publisher(DiskTransport(args), trainer, engines, **{"first_pause_s": 0.0, **options})


class Workers:
    """Rollout workers: notes what they are told in ``calls``, those of the engines among them."""

    def __init__(self, calls: list[str], error: Exception | None = None) -> None:
        self._calls, self._error = calls, error

    def hold(self) -> None:
        self._calls.append("hold")
        if self._error is not None:
            raise self._error

    def unhold(self) -> None:
        self._calls.append("unhold")
        if self._error is not None:
            raise self._error


def drained(folder: Path, engines: FakeEngines, error: Exception | None = None, **options: Any) -> Publisher:
    workers = Workers(engines.calls, error)
    return publisher(folder, engines, hold=workers.hold, unhold=workers.unhold, **{"drains": True, **options})


def test_requests_are_held_around_the_pause_and_not_while_weights_are_written(tmp_path: Path) -> None:
    engines = FakeEngines()

    class Noting(DiskTransport):
        def prepare(self, version: int) -> None:
            super().prepare(version)
            engines.calls.append("prepare")

    args: Any = compose(CORE_SECTIONS)(run_dir=str(tmp_path), hf_checkpoint=str(tmp_path))
    workers = Workers(engines.calls)
    trainer = local_senders(Noting, args, export)
    chosen: Any = Publisher(Noting(args), trainer, engines, hold=workers.hold, unhold=workers.unhold, drains=True)  # type: ignore[arg-type]  # a fake
    metrics = chosen.publish(1)
    assert engines.calls == ["prepare", "hold", "pause", "flush", "update", "versions", "resume", "unhold"]
    assert {"perf/publish_write", "perf/publish_drain", "perf/publish_pause"} == set(metrics)


def test_without_drains_nothing_is_held(tmp_path: Path) -> None:
    engines = FakeEngines()
    metrics = drained(tmp_path, engines, drains=False).publish(1)
    assert "hold" not in engines.calls
    assert "perf/publish_drain" not in metrics


@pytest.mark.parametrize("failures", [2, 3])
def test_a_failed_publication_holds_once_and_always_lets_go(tmp_path: Path, failures: int) -> None:
    engines = FakeEngines(fail_on="update", error=EngineError("broken"), failures=failures)
    chosen = drained(tmp_path, engines)
    if failures == 3:
        with pytest.raises(EngineError, match="broken"):
            chosen.publish(1)
    else:
        chosen.publish(1)
    assert (engines.calls.count("hold"), engines.calls.count("unhold")) == (1, 1)
    assert engines.calls[-1] == "unhold"


def test_requests_that_do_not_end_fail_the_publication_before_any_engine_is_paused(tmp_path: Path) -> None:
    engines = FakeEngines()
    with pytest.raises(DeadlineError, match="they run"):
        drained(tmp_path, engines, DeadlineError("they run")).publish(1)
    assert engines.calls == ["hold", "unhold"]


def test_a_worker_that_died_holds_nothing_back(tmp_path: Path) -> None:
    engines = FakeEngines()
    drained(tmp_path, engines, WorkerDiedError("the process died", where="rollout 0")).publish(1)
    assert engines.calls == ["hold", "pause", "flush", "update", "versions", "resume", "unhold"]


def test_the_time_that_requests_take_to_end_is_not_that_of_the_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("buffer_rl.weights.publish.time.monotonic", lambda: now[0])
    engines = FakeEngines(fail_on="update", error=EngineError("broken"), failures=1)

    def hold() -> None:
        now[0] += 1000.0

    chosen = publisher(tmp_path, engines, hold=hold, drains=True, timeout_s=10.0)
    metrics = chosen.publish(1)
    assert engines.version == 1
    assert (metrics["perf/publish_drain"], metrics["perf/publish_pause"]) == (1000.0, 0.0)


async def ask(client: EngineClient, places: asyncio.Semaphore, number: int) -> GenerateResult:
    async with places:
        return await client.agenerate(f"r{number}-", [4, number], {})


async def test_nothing_is_in_flight_when_engines_are_paused_and_all_requests_are_answered(tmp_path: Path) -> None:
    loop, places, versions, in_flight = asyncio.get_running_loop(), asyncio.Semaphore(8), 0, []
    with FakeEngine(latency=lambda body: 0.02, slots=4) as engine, EngineControlClient([engine.url]) as control:
        pause = control.pause

        def noting(mode: str = "retract") -> int | None:
            in_flight.append(engine.log.in_flight)
            return pause(mode)

        control.pause = noting  # type: ignore[method-assign]
        async with EngineClient(engine.url, [engine.url]) as client:

            def hold() -> None:
                asyncio.run_coroutine_threadsafe(client.gate.close(60.0), loop).result()

            def unhold() -> None:
                loop.call_soon_threadsafe(client.gate.open)

            chosen = publisher(tmp_path, control, hold=hold, unhold=unhold, drains=True)
            asked = [asyncio.create_task(ask(client, places, number)) for number in range(100)]
            while not all(task.done() for task in asked):
                versions += 1
                await asyncio.to_thread(chosen.publish, versions)
            results = await asyncio.gather(*asked)
    assert versions > 1
    assert in_flight == [0] * versions
    assert all(len(result.spans) == 1 for result in results)
    assert len({result.spans[0].version for result in results}) > 1


def test_an_engine_that_flushes_while_a_request_is_retracted_needs_no_drain(tmp_path: Path) -> None:
    notices: list[str] = []
    engine = FakeEngine(lambda ids, seed: range(400), latency=lambda body: 0.3)
    with engine, EngineControlClient([engine.url]) as control:
        chosen = publisher(tmp_path, control, hold=fail, notice=notices.append)
        assert chosen.try_retraction()
        chosen.publish(1)
    assert "retract" in engine.log.pauses
    assert "abort" not in engine.log.pauses
    assert engine.log.aborted == []
    assert notices == []


@pytest.mark.parametrize("own", [True, False])
def test_of_the_runs_own_engines_which_are_alike_one_is_tried_and_of_others_each(tmp_path: Path, own: bool) -> None:
    engines = [FakeEngine(lambda ids, seed: range(400), latency=lambda body: 0.3) for _ in range(2)]
    with engines[0], engines[1]:
        registry = EngineRegistry.of_urls([engine.url for engine in engines])
        registry.replaces = own
        with EngineControlClient(registry) as control:
            assert publisher(tmp_path, control).try_retraction()
    assert ["retract" in engine.log.pauses for engine in engines] == [True, not own]


def fail() -> None:
    raise AssertionError("it was held")


def refuses(engine: FakeEngine) -> Fault | None:
    return Fault.SERVER_ERROR


def dies(engine: FakeEngine) -> Fault | None:
    return Fault.KILL


@pytest.mark.parametrize(("meets", "said"), [(refuses, "HTTP 500"), (dies, "Disconnected")])
def test_one_that_refuses_or_ends_has_requests_drained_and_a_notice_says_so(
    tmp_path: Path, meets: Callable[[FakeEngine], Fault | None], said: str
) -> None:
    notices: list[str] = []
    calls: list[str] = []

    def control_fault(path: str) -> Fault | None:
        return meets(engine) if path == "/flush_cache" and engine.log.in_flight else None

    engine = FakeEngine(latency=lambda body: 0.3, control_fault=control_fault, back_after_s=0.0)
    with engine, EngineControlClient([engine.url]) as control:
        workers = Workers(calls)
        chosen = publisher(tmp_path, control, hold=workers.hold, unhold=workers.unhold, notice=notices.append)
        assert not chosen.try_retraction()
        chosen.publish(1)
        assert control.versions() == {engine.url: "1"}
    assert calls == ["hold", "unhold"]
    assert notices[0].startswith("publications wait for the end of running requests (--publication drain)")
    assert said in notices[0]


def test_one_whose_requests_are_never_caught_has_them_drained(tmp_path: Path) -> None:
    notices: list[str] = []
    with FakeEngine() as engine, EngineControlClient([engine.url]) as control:
        assert not publisher(tmp_path, control, notice=notices.append).try_retraction()
    assert "no request ran at the moment of its retraction" in notices[0]
