"""Engines that accept connections and answer nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.engine.registry import EngineRegistry, Heartbeat, Replica, ReplicaState
from buffer_rl.testing.fake_engine import FakeEngine, Fault


def replica(index: int, engine: FakeEngine, state: ReplicaState = ReplicaState.SERVING) -> Replica:
    process: Any = SimpleNamespace(url=engine.url, check=lambda: None)
    return Replica(index=index, engine=process, state=state)


def hang(engine: FakeEngine) -> None:
    """From now on it answers nothing; the call that does it does not end."""

    def ask() -> None:
        try:
            urllib.request.urlopen(f"{engine.url}/pause_generation", data=b"{}", timeout=0.2)
        except OSError:
            return

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()


def until(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("state", [ReplicaState.SERVING, ReplicaState.WAITING, ReplicaState.LOADING])
def test_an_engine_that_hangs_has_failed_and_the_others_have_not(state: ReplicaState) -> None:
    with FakeEngine() as well, FakeEngine(control_fault=lambda _: Fault.HANG, back_after_s=600.0) as hung:
        replicas = [replica(0, well), replica(1, hung, state)]
        heartbeat = Heartbeat(EngineRegistry(replicas=replicas), timeout_s=0.3)
        heartbeat.start()
        try:
            hang(hung)
            until(lambda: replicas[1].error() is not None)
        finally:
            heartbeat.stop()
    assert "engine 1 hangs: no answer to /health for 0.3 s" in str(replicas[1].error())
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
        replicas = [replica(0, well), Replica(index=1, engine=process, state=ReplicaState.SERVING)]
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
        one = replica(0, engine)
        heartbeat = Heartbeat(EngineRegistry(replicas=[one]), timeout_s=30.0)
        heartbeat._interval_s = 0.05
        heartbeat.start()
        try:
            for _ in range(2):
                hang(engine)
                until(lambda: heartbeat._failing_since)
                until(lambda: not heartbeat._failing_since)
        finally:
            heartbeat.stop()
    assert one.error() is None


def test_an_engine_that_does_not_serve_yet_is_not_asked() -> None:
    with FakeEngine(control_fault=lambda _: Fault.HANG, back_after_s=600.0) as hung, FakeEngine() as well:
        starting, serving = replica(0, hung, ReplicaState.STARTING), replica(1, well)
        heartbeat = Heartbeat(EngineRegistry(replicas=[starting, serving]), timeout_s=0.1)
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
