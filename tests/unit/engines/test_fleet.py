"""Real processes: engines, the real router, and what is left when something fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from buffer_rl.cluster.process import ChildProcess, ServerProcess, reserved_port
from buffer_rl.embedded.launcher import launch
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.engines.router import launch as launch_router
from buffer_rl.errors import ConfigError, DeadlineError, EngineError
from buffer_rl.testing.fake_engine import FakeEngine


def alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition, what, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)


def end_of(fleet):
    """What ``check`` raises, or None."""
    try:
        fleet.check()
    except EngineError as error:
        return error
    return None


def pids_of(fleet):
    return [engine.process.pid for engine in fleet.engines] + ([fleet.router.process.pid] if fleet.router else [])


def group_members(leader):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[2]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def test_the_routers_address_is_known_before_an_engine_is_ready_and_it_lists_engines_that_are(engine_args, tmp_path):
    with FakeEngine() as fake:

        class Engine:
            url, is_ready = fake.url, False

            def wait_ready(self, timeout_s):
                self.is_ready = True

            def check(self):
                pass

            def stop(self):
                pass

        engine = Engine()
        with EngineFleet(engine_args(), str(tmp_path), lambda *_: engine) as fleet:
            address = fleet.router_url
            assert fleet.router.workers() == {}
            assert not engine.is_ready
            fleet.wait_ready()
            assert list(fleet.router.workers()) == [fake.url]
            assert fleet.addresses == {"router_url": address, "engine_urls": []}


@pytest.mark.slow
def test_two_engines_behind_the_router_share_the_work_and_end_without_a_trace(engine_args, tmp_path):
    with EngineFleet(engine_args(rollout_num_engines=2), str(tmp_path), launch) as fleet:
        fleet.wait_ready()
        pids = pids_of(fleet)
        assert len(fleet.engine_urls) == 2

        async def generate():
            async with EngineClient(fleet.router_url, fleet.engine_urls) as client:
                requests = [
                    client.agenerate(f"{g}-{i}", [5 + g, 6, 7], {"max_new_tokens": 4, "sampling_seed": 8 * g + i})
                    for g in range(12)
                    for i in range(4)
                ]
                return await asyncio.gather(*requests)

        results = asyncio.run(generate())
        # Samples of a prompt reach one engine, which runs the prompt once: 3 of 4 find it there.
        assert sum(result.cached_tokens > 0 for result in results) == 36
        fleet.check()
    assert [pid for leader in pids for pid in group_members(leader)] == []
    assert (tmp_path / "logs" / "engine_1.log").exists()
    assert (tmp_path / "logs" / "router.log").exists()
    fleet.stop()


@pytest.mark.slow
def test_a_dead_engine_is_named_with_its_log(engine_args, tmp_path):
    with EngineFleet(engine_args(engine_max_restarts=0), str(tmp_path), launch) as fleet:
        fleet.wait_ready()
        os.kill(fleet.engines[0].process.pid, signal.SIGKILL)
        wait_until(lambda: end_of(fleet) is not None, "the notice of the engine's death")
        assert "no engine is left: embedded engine 0 was killed by signal 9" in str(end_of(fleet))
        assert "engine_0.log" in str(end_of(fleet))
        assert fleet.engines == []
        wait_until(lambda: fleet.router.workers() == {}, "its end in the router's list")


@pytest.mark.slow
def test_an_engine_that_cannot_load_fails_the_start_with_its_log_and_stops_the_others(engine_args, tmp_path):
    broken = tmp_path / "model"
    broken.mkdir()
    good = engine_args()
    fleet = EngineFleet(
        engine_args(rollout_num_engines=2),
        str(tmp_path),
        lambda args, index, log: launch(good if index == 0 else engine_args(hf_checkpoint=str(broken)), index, log),
    )
    fleet.start()
    pids = pids_of(fleet)
    with pytest.raises(EngineError, match=r"config\.json is missing"):
        fleet.wait_ready()
    assert not any(alive(pid) for pid in pids)
    assert fleet.engine_urls == []


class Loading:
    """An engine that loads until it is stopped, or ends at once with ``failure``."""

    url = "http://127.0.0.1:1"

    def __init__(self, failure=None):
        self.failure, self.stopped = failure, threading.Event()

    def wait_ready(self, timeout_s):
        if self.failure is not None:
            raise self.failure
        self.stopped.wait(timeout_s)
        raise DeadlineError("still loading")

    def check(self):
        pass

    def stop(self):
        self.stopped.set()


def test_an_engine_that_ends_fails_the_start_while_those_before_it_still_load(engine_args, tmp_path):
    engines = [Loading(), Loading(EngineError("no device; the end of its log:\nCUDA"))]
    args = engine_args(rollout_num_engines=2, engine_start_timeout_s=600.0)
    fleet = EngineFleet(args, str(tmp_path), lambda _, index, __: engines[index])
    fleet.start()
    with pytest.raises(EngineError, match="no device; the end of its log:\nCUDA"):
        fleet.wait_ready()
    assert all(engine.stopped.is_set() for engine in engines)


@pytest.mark.parametrize("router", ["sglang", "smg"])
def test_a_router_that_ends_fails_the_start_while_engines_still_load(engine_args, tmp_path, router):
    if router == "smg":
        pytest.importorskip("smg")
    args = engine_args(engine_start_timeout_s=600.0, router=router)
    with EngineFleet(args, str(tmp_path), lambda *_: Loading()) as fleet:
        os.kill(fleet.router.process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"(sglang-router|smg) was killed by signal 9; its log is empty"):
            fleet.wait_ready()


def test_a_router_that_lists_no_engine_or_has_ended_fails_the_call_with_the_end_of_its_log(engine_args, tmp_path):
    log = tmp_path / "router.log"
    router = launch_router(engine_args(), str(log))
    try:
        router.wait_ready(60.0)
        with log.open("a") as file:
            file.write("\x1b[33m WARN\x1b[0m no route to it\n")
        unreachable = "http://127.0.0.1:1"
        with pytest.raises(DeadlineError, match=f"did not list {unreachable} in time; the end of its log:") as caught:
            router.add(unreachable, timeout_s=0.0)
        assert "\n WARN no route to it" in caught.value.what
        assert caught.value.where == str(log)

        def ended():
            raise EngineError("the engine has ended")

        with pytest.raises(EngineError, match="the engine has ended"):
            router.add("http://127.0.0.1:2", timeout_s=600.0, check=ended)
        os.kill(router.process.pid, signal.SIGKILL)
        wait_until(lambda: router.process.exit_status is not None, "the router's end")
        with pytest.raises(EngineError, match="was killed by signal 9; the end of its log:"):
            router.workers()
    finally:
        router.stop()


def test_a_launch_that_fails_stops_what_was_started(engine_args, tmp_path):
    started = []

    def second_fails(args, index, log):
        if index == 1:
            raise EngineError("no machine left")
        started.append(launch(args, index, log))
        return started[-1]

    fleet = EngineFleet(engine_args(rollout_num_engines=2), str(tmp_path), second_fails)
    with pytest.raises(EngineError, match="no machine left"):
        fleet.start()
    assert not alive(started[0].process.pid)


def test_an_engine_that_does_not_answer_in_time_is_a_deadline_error_and_is_stopped(engine_args, tmp_path):
    with EngineFleet(engine_args(engine_start_timeout_s=0.05), str(tmp_path), launch) as fleet:
        pids = pids_of(fleet)
        with pytest.raises(DeadlineError, match="engine 0 did not answer"):
            fleet.wait_ready()
        assert not any(alive(pid) for pid in pids)


def test_an_external_router_is_used_as_it_is(engine_args, tmp_path):
    args = engine_args(router_url="http://router:1", engine_urls=["http://engine:2"])
    with EngineFleet(args, str(tmp_path), launch) as fleet:
        fleet.wait_ready()
        fleet.check()
        assert (fleet.router_url, fleet.engine_urls) == ("http://router:1", ["http://engine:2"])
    with pytest.raises(ConfigError, match="--router-url needs the engines"):
        EngineFleet(engine_args(router_url="http://router:1"), str(tmp_path), launch)


@pytest.mark.slow
def test_engines_and_router_die_with_a_parent_that_is_killed(engine_args, tmp_path):
    script = f"""
import sys, time
from types import SimpleNamespace
from buffer_rl.embedded.launcher import launch
from buffer_rl.engines.fleet import EngineFleet
fleet = EngineFleet(SimpleNamespace(**{vars(engine_args())!r}), {str(tmp_path)!r}, launch)
fleet.start()
fleet.wait_ready()
print(fleet.engines[0].process.pid, fleet.router.process.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        engine, router = map(int, parent.stdout.readline().split())
        assert group_members(engine)
        wait_until(lambda: len(group_members(router)) == 2, "the router and its watcher")
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: not group_members(engine) and not group_members(router), "the children's end")


def test_a_process_that_ignores_sigterm_is_killed(tmp_path):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    child = ChildProcess("stubborn", [sys.executable, "-c", code], str(tmp_path / "log"))
    wait_until(lambda: "up" in child.log_tail(), "the start")
    child.stop(timeout_s=0.2)
    assert child.exit_status == -signal.SIGKILL
    child.stop()


def test_nothing_of_a_process_group_is_left_whose_leader_was_killed(tmp_path):
    code = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    print("up", flush=True)
time.sleep(600)
"""
    child = ChildProcess("leader", [sys.executable, "-c", code], str(tmp_path / "log"))
    wait_until(lambda: "up" in child.log_tail(), "the start")
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: child.exit_status is not None, "the leader's end")
    assert len(group_members(child.pid)) == 1
    child.stop()
    assert group_members(child.pid) == []


SERVER = """
import http.server, sys, time
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
try:
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ok).serve_forever()
except OSError as error:
    print(error, flush=True)
    time.sleep(float(sys.argv[2]))
    raise
"""


@contextlib.contextmanager
def taking_ports(number, lives_s=0):
    """The command of a server, and the ports that it was given; the first ``number`` are taken before it starts.
    lives_s: for how long it lives without a port."""
    given = []
    with contextlib.ExitStack() as held:

        def command(ports):
            if len(given) < number:
                held.enter_context(socket.create_server(("127.0.0.1", ports[0])))
            given.extend(ports)
            return [sys.executable, "-c", SERVER, str(ports[0]), str(lives_s)]

        yield command, given


@pytest.mark.parametrize("lives_s", [0, 600])
def test_a_server_whose_port_another_process_took_is_started_again_on_another_one(tmp_path, lives_s):
    with taking_ports(2, lives_s) as (command, given):
        server = ServerProcess("server", command, str(tmp_path / "log"), hosts=["127.0.0.1"])
        try:
            server.wait_ready(60.0)
            assert len(given) == 3
            assert server.url == f"http://127.0.0.1:{given[2]}"
            assert urllib.request.urlopen(server.url, timeout=10).status == 200
        finally:
            server.stop()


def test_a_reserved_port_is_taken_for_all_but_a_server_that_reuses_its_address():
    with reserved_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass


@pytest.mark.slow
def test_a_server_that_finds_no_port_or_ends_otherwise_fails_with_its_log(tmp_path):
    with taking_ports(9) as (command, given):
        server = ServerProcess("server", command, str(tmp_path / "log"), hosts=["127.0.0.1"])
        with pytest.raises(EngineError, match="server exited with status 1"):
            server.wait_ready(60.0)
        assert len(given) == 3

    def broken(ports):
        given.extend(ports)
        return [sys.executable, "-c", "raise SystemExit('no model')"]

    failing = ServerProcess("server", broken, str(tmp_path / "log"), hosts=["127.0.0.1"])
    with pytest.raises(EngineError, match="no model"):
        failing.wait_ready(60.0)
    assert len(given) == 4
    server.stop()
    failing.stop()


def test_a_command_that_does_not_exist_is_an_engine_error(tmp_path):
    with pytest.raises(EngineError, match="cannot be started"):
        ChildProcess("ghost", [str(tmp_path / "nothing")], str(tmp_path / "log"))
