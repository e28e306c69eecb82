"""Engines that are killed: who answers their requests, who takes their place, and with which weights."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.request
from contextlib import ExitStack, contextmanager

import pytest

from buffer_rl.embedded.launcher import launch
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.engines.protocol import Adapter
from buffer_rl.errors import EngineError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.testing.fake_engine import FakeEngine, Fault
from harness.adapters import with_random_adapter
from harness.processes import holds_within


@pytest.fixture
def closing():
    """Has what it is given closed when the test ends."""
    with ExitStack() as stack:
        yield stack.enter_context


@contextmanager
def watched(fleet):
    """Calls ``check`` again and again, as a driver does. Yields what it raised."""
    raised: list[Exception] = []
    end = threading.Event()

    def watch():
        while not end.wait(0.1):
            try:
                fleet.check()
            except EngineError as error:
                raised.append(error)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield raised
    finally:
        end.set()
        thread.join()


def kill(fleet, place):
    engine = fleet.engines[place]
    os.kill(engine.process.pid, signal.SIGKILL)
    return engine.url


def num_running(url):
    with urllib.request.urlopen(f"{url}/server_info", timeout=10) as response:
        return json.loads(response.read())["num_running_requests"]


def both_serve_without(fleet, lost):
    return lambda: len(urls := fleet.router.workers()) == 2 and lost not in urls


PROMPTS = [[5 + i, 6, 7] for i in range(16)]


async def answers_of(fleet, params, name, at_work=lambda: None):
    async with EngineClient(fleet.router_url, [], timeout_s=60, waits_for_engine=True) as client:
        tasks = [
            asyncio.create_task(client.agenerate(f"{name}-{i:02}", prompt, {**params, "sampling_seed": i}))
            for i, prompt in enumerate(PROMPTS)
        ]
        await asyncio.to_thread(at_work)
        return [result.output_ids for result in await asyncio.gather(*tasks)]


@pytest.mark.slow
def test_requests_at_an_engine_that_is_killed_get_the_same_answers_elsewhere_and_it_is_replaced(engine_args, tmp_path):
    notices: list[str] = []
    args = engine_args(rollout_num_engines=2)
    params = {"max_new_tokens": 400, "ignore_eos": True}
    with EngineFleet(args, str(tmp_path), launch, notices.append) as fleet, watched(fleet) as raised:
        fleet.wait_ready()
        expected = asyncio.run(answers_of(fleet, params, "first"))
        lost = []

        def kill_at_work():
            victim = fleet.engines[1]
            assert holds_within(60, lambda: num_running(victim.url) > 0)
            lost.append(kill(fleet, 1))

        assert asyncio.run(answers_of(fleet, params, "second", kill_at_work)) == expected
        assert holds_within(60, both_serve_without(fleet, lost[0]))
        assert asyncio.run(answers_of(fleet, params, "third")) == expected
        assert holds_within(60, lambda: len(notices) == 2)
        assert raised == []
    assert "embedded engine 1 was killed by signal 9" in notices[0]
    assert "the run goes on with 1 engine while another one starts in its place (1 of at most 2 restarts)" in notices[0]
    assert notices[1] == "engine 1 is back, with the initial weights"
    told = [line.split(" ", 2)[2] for line in (tmp_path / "logs" / "fleet.log").read_text().splitlines()]
    transitions = [line.partition(" (")[0] for line in told if line not in notices]
    assert [line for line in told if line in notices] == notices
    steps = ["starting -> serving", "serving -> dead", "restarting -> loading", "loading -> serving"]
    assert [line for line in transitions if line.startswith("engine 1")] == [f"engine 1: {step}" for step in steps]
    assert (tmp_path / "logs" / "engine_1_restart_1.log").exists()


@pytest.mark.slow
def test_a_replacement_takes_the_weights_of_the_newest_version_and_the_last_death_ends_the_run(
    engine_args, closing, model_folder, tmp_path
):
    args = engine_args(rollout_num_engines=2, engine_max_restarts=1)
    notices: list[str] = []
    with EngineFleet(args, str(tmp_path), launch, notices.append) as fleet, watched(fleet) as raised:
        fleet.wait_ready()
        control = closing(fleet.control(30.0))
        control.pause()
        control.flush()
        control.update_weights_from_disk(model_folder("qwen3", seed=1), 7)
        assert set(control.versions().values()) == {"7"}
        control.resume()
        greedy = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        expected = asyncio.run(answers_of(fleet, greedy, "first"))
        lost = kill(fleet, 0)
        assert holds_within(60, both_serve_without(fleet, lost))
        assert set(closing(EngineControlClient(list(fleet.router.workers()))).versions().values()) == {"7"}
        assert holds_within(60, lambda: len(notices) == 2)
        kill(fleet, 1)
        assert holds_within(60, lambda: len(fleet.router.workers()) == 1)
        # The replacement alone answers now, with the weights that it was given.
        assert asyncio.run(answers_of(fleet, greedy, "second")) == expected
        assert holds_within(60, lambda: len(notices) == 3)
        assert raised == []
        kill(fleet, 0)
        assert holds_within(60, lambda: bool(raised))
    assert notices[1] == "engine 0 is back, with the weights of version 7"
    assert "none is started in its place (--engine-max-restarts 1)" in notices[2]
    assert "no engine is left: embedded engine 0 was killed by signal 9; " in str(raised[0])
    assert "engine_0_restart_1.log" in str(raised[0])


@pytest.mark.slow
def test_a_replacement_takes_the_newest_adapter(engine_args, closing, model_folder, tmp_path):
    notices: list[str] = []
    with EngineFleet(engine_args(rollout_num_engines=2), str(tmp_path), launch, notices.append) as fleet:
        fleet.wait_ready()
        control = closing(fleet.control(30.0))
        for version in (6, 7):
            with_random_adapter(model_folder("qwen3"), tmp_path / str(version), version)
            control.pause("in_place")
            control.load_adapter(f"v{version}", str(tmp_path / str(version)), version)
            assert set(control.versions().values()) == {str(version)}
            control.resume()
        lost = kill(fleet, 0)
        assert holds_within(60, both_serve_without(fleet, lost))
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "temperature": 0}, "return_logprob": True}
        urls = list(fleet.router.workers())
        direct = closing(EngineControlClient(urls))
        answers = direct.sample(urls, Adapter("v7", 7).named_in(body))
        assert len({str(answer["meta_info"]["output_token_logprobs"]) for answer in answers.values()}) == 1
        assert {answer["meta_info"]["weight_versions"][0]["version"] for answer in answers.values()} == {"7"}
        assert set(direct.versions().values()) == {"7"}


@pytest.mark.slow
def test_a_router_that_is_too_busy_to_let_go_of_a_dead_engine_is_asked_again(engine_args, tmp_path, monkeypatch):
    notices: list[str] = []
    args = engine_args(rollout_num_engines=2, engine_max_restarts=0)
    with EngineFleet(args, str(tmp_path), launch, notices.append) as fleet, watched(fleet) as raised:
        fleet.wait_ready()
        monkeypatch.setattr("buffer_rl.engines.router.CALL_TIMEOUT_S", 0.3)
        os.kill(fleet.router.process.pid, signal.SIGSTOP)
        try:
            lost = kill(fleet, 0)
            assert holds_within(60, lambda: len(notices) > 2)
        finally:
            os.kill(fleet.router.process.pid, signal.SIGCONT)
        monkeypatch.undo()
        assert holds_within(60, lambda: list(fleet.router.workers()) == [fleet.engines[0].url])
        assert raised == []
    assert "the run goes on with 1 engine" in notices[0]
    assert f"the router still lists {lost}: " in notices[1]


@pytest.mark.slow
def test_an_engine_that_hangs_is_noticed_by_its_silence_and_replaced_and_its_requests_are_answered_elsewhere(
    engine_args, tmp_path
):
    notices: list[str] = []
    args = engine_args(rollout_num_engines=2, rollout_health_check_timeout=5.0)
    params = {"max_new_tokens": 400, "ignore_eos": True}
    with EngineFleet(args, str(tmp_path), launch, notices.append) as fleet, watched(fleet) as raised:
        fleet.wait_ready()
        expected = asyncio.run(answers_of(fleet, params, "first"))
        lost = []

        def stop_at_work():
            victim = fleet.engines[1]
            assert holds_within(60, lambda: num_running(victim.url) > 0)
            os.kill(victim.process.pid, signal.SIGSTOP)
            lost.append(victim.url)

        assert asyncio.run(answers_of(fleet, params, "second", stop_at_work)) == expected
        assert holds_within(60, both_serve_without(fleet, lost[0]))
        assert raised == []
    assert f"engine 1 hangs: no answer to /server_info for 5 s ({lost[0]}); the run goes on with 1 engine" in notices[0]
    log = (tmp_path / "logs" / "fleet.log").read_text()
    assert "engine 1: serving -> suspect" in log
    assert "engine 1: suspect -> dead" in log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_requests_of_the_only_engine_wait_for_its_replacement_and_get_the_same_answers(
    engine_args, tmp_path, number
):
    args = engine_args(rollout_health_check_timeout=5.0, engine_max_restarts=1)
    params = {"max_new_tokens": 200, "ignore_eos": True}
    with EngineFleet(args, str(tmp_path), launch) as fleet, watched(fleet) as raised:
        fleet.wait_ready()
        expected = asyncio.run(answers_of(fleet, params, "first"))

        def lose_at_work():
            victim = fleet.engines[0]
            assert holds_within(60, lambda: num_running(victim.url) > 0)
            os.kill(victim.process.pid, number)

        assert asyncio.run(answers_of(fleet, params, "second", lose_at_work)) == expected
        assert raised == []


@pytest.mark.parametrize(("package", "said"), [("sglang", "no_available_workers"), ("smg", "model_not_found")])
def test_a_request_to_a_router_without_an_engine_waits_for_one_where_the_run_replaces_them(
    engine_args, tmp_path, package, said
):
    pytest.importorskip({"sglang": "sglang_router"}.get(package, package))
    router = PluginRegistry().resolve("router", package)(engine_args(), str(tmp_path / "router.log"))

    async def ask(waits):
        settings = {"timeout_s": 60, "max_retries": 0, "waits_for_engine": waits}
        async with EngineClient(router.url, [], **settings) as client:
            return await client.agenerate("a", [5, 6], {"max_new_tokens": 2})

    async def ask_and_add(url):
        request = asyncio.create_task(ask(waits=True))
        await asyncio.wait([request], timeout=0.2)  # it has met a router without an engine by then
        await asyncio.to_thread(router.add, url)
        return await request

    try:
        router.wait_ready(30.0)
        with pytest.raises(EngineError, match=said):
            asyncio.run(ask(waits=False))
        with FakeEngine() as fake:
            assert asyncio.run(ask_and_add(fake.url)).output_ids == [6, 5]
    finally:
        router.stop()


@pytest.mark.slow
def test_a_suspect_engine_gets_no_new_requests_while_another_one_serves_and_comes_back(engine_args, tmp_path):
    args = engine_args(rollout_num_engines=2, rollout_health_check_timeout=60.0)
    with EngineFleet(args, str(tmp_path), launch) as fleet, watched(fleet) as raised:
        fleet.wait_ready()
        fleet._heartbeat._interval_s, fleet._heartbeat._probe_s = 0.1, 2.0
        victim = fleet.engines[1]
        os.kill(victim.process.pid, signal.SIGSTOP)
        assert holds_within(60, lambda: victim.url not in fleet.router.workers())
        os.kill(victim.process.pid, signal.SIGCONT)
        assert holds_within(60, lambda: victim.url in fleet.router.workers())
        assert raised == []


class InProcess:
    """A fake engine as the fleet sees an engine's process."""

    def __init__(self, control_fault=None):
        self.fake = FakeEngine(control_fault=control_fault, back_after_s=600.0)
        self.fake.__enter__()
        self.url = self.fake.url
        self.ended = threading.Event()

    def wait_ready(self, timeout_s):
        return

    def check(self):
        if self.ended.is_set():
            raise EngineError("the engine was killed", where=self.url)

    def stop(self):
        if not self.ended.is_set():
            self.ended.set()
            self.fake.__exit__()


@pytest.mark.slow
def test_a_replacement_that_hangs_while_it_takes_the_weights_is_replaced_and_holds_no_publication_up(
    engine_args, closing, tmp_path
):
    hangs_once = [Fault.HANG]
    notices: list[str] = []

    def launch_fake(args, index, log_path):
        if "restart" not in log_path:
            return InProcess()
        return InProcess(lambda path: hangs_once.pop() if path.startswith("/update") and hangs_once else None)

    args = engine_args(rollout_num_engines=2, rollout_health_check_timeout=5.0, update_weights_timeout_s=600.0)
    folder = tmp_path / "weights"
    folder.mkdir()
    with EngineFleet(args, str(tmp_path), launch_fake, notices.append) as fleet, watched(fleet) as raised:
        fleet.wait_ready()
        control = closing(fleet.control(600.0))
        control.pause()
        control.update_weights_from_disk(str(folder), 7)
        control.versions()
        control.resume()
        fleet.engines[1].stop()
        assert holds_within(60, lambda: len(notices) == 3)
        control.pause()  # nobody holds it up, although what the replacement was asked would wait for 600 s
        assert set(control.versions().values()) == {"7"}
        control.resume()
        assert raised == []
    assert "engine 1 hangs: no answer to /health for 5 s" in notices[1]
    assert notices[2] == "engine 1 is back, with the weights of version 7"
