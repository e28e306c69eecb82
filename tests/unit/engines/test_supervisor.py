"""The supervisor of engines that are scripted: launches that fail, and what it cannot mend. The heartbeat of engines
that accept connections and answer nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.engines.registry import EngineRegistry, EngineState, Published, Replica
from buffer_rl.engines.supervisor import Heartbeat, Supervisor
from buffer_rl.errors import DeadlineError, EngineError
from buffer_rl.testing.fake_engine import FakeEngine, Fault
from harness.processes import holds_within
from harness.sglang_service import launch_imitating_sglang


class Process:
    """An engine process that is alive unless ``failure`` says otherwise."""

    def __init__(self, name: str, failure: Exception | None = None) -> None:
        self.url = f"http://{name}"
        self.failure = failure
        self.stopped = False

    def wait_ready(self, timeout_s: float) -> None:
        return

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        self.stopped = True


class Router:
    """A list of engines."""

    def __init__(self, *urls: str) -> None:
        self.urls = set(urls)

    def add(self, url: str, timeout_s: float) -> None:
        self.urls.add(url)

    def remove(self, url: str) -> None:
        self.urls.remove(url)


@contextmanager
def supervised(
    launch: Callable[[int, str], Process], *processes: Process, max_restarts: int = 2
) -> Iterator[tuple[EngineRegistry, Router, list[str]]]:
    registry = EngineRegistry(
        replicas=[Replica(index=i, engine=process, state=EngineState.SERVING) for i, process in enumerate(processes)]
    )
    args = SimpleNamespace(
        engine_max_restarts=max_restarts,
        engine_start_timeout_s=9.0,
        update_weights_timeout_s=9.0,
        engine_api_key=None,
        rollout_external_engine_addrs=[],
    )
    router, said = Router(*(process.url for process in processes)), []
    listing: Any = router
    supervisor = Supervisor(args, registry, listing, launch, said.append)
    supervisor.start()
    try:
        yield registry, router, said
    finally:
        supervisor.stop()
        supervisor.join()


def test_a_launch_that_fails_is_tried_again_while_restarts_are_left() -> None:
    asked: list[tuple[int, str]] = []

    def launch(index: int, log_name: str) -> Process:
        asked.append((index, log_name))
        if len(asked) == 1:
            raise ValueError("no memory")
        return Process("new")

    with supervised(launch, Process("well"), lost := Process("lost")) as (registry, router, said):
        lost.failure = EngineError("it was killed", where="lost.log")
        assert holds_within(60, lambda: router.urls == {"http://well", "http://new"})
        assert holds_within(60, lambda: len(said) == 3)
    assert lost.stopped
    assert asked == [(1, "engine_1_restart_1.log"), (1, "engine_1_restart_2.log")]
    assert [replica.index for replica in registry.all()] == [0, 1]
    assert registry.over is None
    assert said[0].startswith("it was killed (lost.log); the run goes on with 1 engine while another one starts")
    assert said[1:] == ["engine 1 could not be started again: no memory", "engine 1 is back, with the initial weights"]


def test_it_is_over_once_every_restart_was_used_and_not_before() -> None:
    replacement = Process("new")

    def launch(index: int, log_name: str) -> Process:
        return replacement

    with supervised(launch, lost := Process("lost"), max_restarts=1) as (registry, router, said):
        lost.failure = DeadlineError("no answer from its process", where="first")
        assert holds_within(60, lambda: router.urls == {"http://new"})
        assert registry.over is None
        replacement.failure = EngineError("it was killed", where="second")
        assert holds_within(60, lambda: registry.over is not None)
        assert router.urls == set()
    assert registry.over is not None
    assert (registry.over.what, registry.over.where) == ("no engine is left: it was killed", "second")
    assert "none is started in its place (--engine-max-restarts 1)" in said[-1]


def test_what_the_supervisor_cannot_handle_ends_the_run() -> None:
    with supervised(lambda index, log_name: Process("new"), odd := Process("odd")) as (registry, _, _):
        odd.failure = KeyError("nobody expects it")
        assert holds_within(60, lambda: registry.over is not None)
    assert "KeyError: 'nobody expects it'" in str(registry.over)


def test_a_notice_of_a_router_that_lists_no_engine_is_one_line_and_names_its_log() -> None:
    one, other = Process("a"), Process("b")
    with supervised(lambda index, name: other, one) as (_, router, said):

        def refuse(url: str, timeout_s: float) -> None:
            raise DeadlineError(f"the router did not list {url}; the end of its log:\nWARN", where="router.log")

        router.add = refuse  # type: ignore[method-assign]
        one.failure = EngineError("it was killed", where="engine_0.log")
        expected = "the router does not list http://b: the router did not list http://b (router.log)"
        assert holds_within(20, lambda: expected in said)


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


SLOW_STATES = [pytest.param(state, marks=pytest.mark.slow) for state in (EngineState.WAITING, EngineState.LOADING)]


@pytest.mark.parametrize("state", [EngineState.SERVING, *SLOW_STATES])
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


@pytest.mark.slow
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


@pytest.mark.parametrize(("status", "lives"), [(200, True), (404, True), (500, False)])
def test_an_engine_of_a_plugin_may_lack_the_path_of_the_probe(status: int, lives: bool) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        registry = EngineRegistry.of_urls([f"http://127.0.0.1:{server.server_port}"])
        answered = Heartbeat(registry, timeout_s=60.0)._answers(registry.all()[0])
        server.shutdown()
        thread.join()
    assert answered is lives


@pytest.mark.slow
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
