"""Engines that accept connections and answer nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.embedded.launcher import launch_imitating_sglang
from buffer_rl.engines.heartbeat import Heartbeat
from buffer_rl.engines.registry import EngineRegistry, Published
from buffer_rl.engines.replica import EngineState, Replica
from buffer_rl.testing.fake_engine import FakeEngine, Fault


def replica(index: int, engine: FakeEngine, state: EngineState = EngineState.SERVING) -> Replica:
    process: Any = SimpleNamespace(url=engine.url, check=lambda: None)
    return Replica(index=index, engine=process, state=state)


def hang(engine: FakeEngine) -> None:
    """From now on it answers nothing; the call that does it does not end."""

    def ask() -> None:
        try:
            urllib.request.urlopen(f"{engine.url}/pause_generation", data=b"{}", timeout=1.0)
        except OSError:
            return

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()


def until(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("state", [EngineState.SERVING, EngineState.WAITING, EngineState.LOADING])
def test_an_engine_that_hangs_has_failed_and_the_others_have_not(state: EngineState) -> None:
    with FakeEngine() as well, FakeEngine(control_fault=lambda _: Fault.HANG, back_after_s=600.0) as hung:
        replicas = [replica(0, well), replica(1, hung, state)]
        heartbeat = Heartbeat(EngineRegistry(replicas=replicas), timeout_s=0.3)
        heartbeat.start()
        try:
            hang(hung)
            until(lambda: replicas[1].error() is not None)
        finally:
            heartbeat.stop()
    probe = "/health" if state is EngineState.LOADING else "/server_info"
    assert f"engine 1 hangs: no answer to {probe} for 0.3 s" in str(replicas[1].error())
    assert replicas[0].error() is None


def test_an_engine_that_answers_garbage_is_not_healthy_and_the_others_are_still_watched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as garbage, FakeEngine() as well:

        def answer() -> None:
            with contextlib.suppress(OSError):  # it is closed at the end
                while True:
                    connection, _ = garbage.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(b"\x00garbage\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        process: Any = SimpleNamespace(url=f"http://127.0.0.1:{garbage.getsockname()[1]}", check=lambda: None)
        replicas = [replica(0, well), Replica(index=1, engine=process, state=EngineState.SERVING)]
        heartbeat = Heartbeat(EngineRegistry(replicas=replicas), timeout_s=0.3)
        heartbeat.start()
        try:
            until(lambda: replicas[1].error() is not None)
        finally:
            heartbeat.stop()
    assert replicas[0].error() is None


@pytest.mark.slow
def test_silences_shorter_than_the_deadline_do_not_add_up() -> None:
    with FakeEngine(control_fault=lambda _: Fault.HANG, back_after_s=1.5) as engine:
        one, passed = replica(0, engine), list[EngineState]()
        one.on_change = lambda who, before, why: passed.append(who.state)
        heartbeat = Heartbeat(EngineRegistry(replicas=[one]), timeout_s=30.0)
        heartbeat._interval_s = 0.05
        heartbeat.start()
        try:
            for silences in (1, 2):
                hang(engine)
                until(lambda so_far=silences: passed == [EngineState.SUSPECT, EngineState.SERVING] * so_far)
        finally:
            heartbeat.stop()
    assert one.error() is None


def test_an_engine_that_does_not_serve_yet_is_not_asked() -> None:
    with FakeEngine(control_fault=lambda _: Fault.HANG, back_after_s=600.0) as hung, FakeEngine() as well:
        starting, serving = replica(0, hung, EngineState.STARTING), replica(1, well)
        heartbeat = Heartbeat(EngineRegistry(replicas=[starting, serving]), timeout_s=0.1)
        heartbeat._probe_s = 30.0
        hang(hung)
        rounds: list[bool] = []
        note = heartbeat._note
        heartbeat._note = lambda who, healthy: (rounds.append(healthy), note(who, healthy))
        heartbeat.start()
        try:
            until(lambda: len(rounds) >= 5)
        finally:
            heartbeat.stop()
    assert starting.error() is None
    assert all(rounds)


class Stalled(FakeEngine):
    """Answers ``/health``, as SGLang does whose scheduler is stopped, and nothing that needs the scheduler."""

    async def _info(self, request: Any) -> Any:
        if request.path != "/health":
            await asyncio.Event().wait()
        return await super()._info(request)


def test_an_engine_whose_scheduler_is_stopped_has_failed_although_it_answers_health() -> None:
    with Stalled() as engine:
        one = replica(0, engine)
        heartbeat = Heartbeat(EngineRegistry(replicas=[one]), timeout_s=0.1)
        heartbeat.start()
        try:
            until(lambda: one.error() is not None)
        finally:
            heartbeat.stop()
    assert "engine 0 hangs: no answer to /server_info" in str(one.error())


def test_a_scheduler_that_loads_weights_may_take_its_time() -> None:
    with Stalled() as engine:
        loading, paused = replica(0, engine, EngineState.LOADING), replica(1, engine)
        registry = EngineRegistry(replicas=[loading, paused])
        heartbeat = Heartbeat(registry, timeout_s=18.0)  # 3 s for a probe
        with registry.publication:
            assert heartbeat._answers(loading)
            assert heartbeat._answers(paused)
        assert heartbeat._answers(loading)
        assert not heartbeat._answers(paused)


@pytest.mark.slow
def test_an_engine_whose_thread_is_stuck_answers_health_and_has_failed_and_its_key_is_sent(
    engine_args: Any, tmp_path: Path
) -> None:
    engine = launch_imitating_sglang(engine_args(engine_api_key="k"), 0, str(tmp_path / "engine.log"))
    try:
        engine.wait_ready(120.0)
        one = Replica(index=0, engine=engine, state=EngineState.SERVING)
        heartbeat = Heartbeat(EngineRegistry(replicas=[one]), timeout_s=3.0, api_key="k")
        until(lambda: heartbeat._answers(one))
        os.kill(engine.process.pid, signal.SIGUSR1)  # the thread that decodes stops
        until(lambda: not heartbeat._answers(one))
        assert urllib.request.urlopen(f"{engine.url}/health", timeout=10).status == 200
        heartbeat.start()
        try:
            until(lambda: one.error() is not None)
        finally:
            heartbeat.stop()
    finally:
        engine.stop()


@pytest.mark.parametrize(("published", "is_dead"), [("7", True), ("0", False), (None, False)])
def test_a_suspect_that_answers_with_other_weights_is_another_process(published: str | None, is_dead: bool) -> None:
    with FakeEngine(version=0) as engine:
        one = replica(0, engine, EngineState.SUSPECT)
        registry = EngineRegistry(replicas=[one])
        if published is not None:
            registry.published = Published(version=published, folder=None)
        Heartbeat(registry, timeout_s=60.0)._note(one, True)
        assert (one.error() is not None) is is_dead
        assert one.state is (EngineState.DEAD if is_dead else EngineState.SERVING)
