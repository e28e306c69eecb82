"""Engines and router answer only to who has the run's key, which stands in no argument list."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.process import KEY_VARIABLE, auth_headers, pop_key, with_engine_key
from buffer_rl.embedded.launcher import launch
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.errors import EngineError
from buffer_rl.options.section import compose

KEY = "the-key-of-this-run-8f2c"


@pytest.fixture(scope="module", params=["sglang", pytest.param("smg", marks=pytest.mark.slow)])
def fleet(request, engine_args, tmp_path_factory):
    if request.param == "smg":
        pytest.importorskip("smg")
    folder = tmp_path_factory.mktemp("run")
    with EngineFleet(engine_args(engine_api_key=KEY, router=request.param), str(folder), launch) as fleet:
        fleet.wait_ready()
        yield fleet


def status(url, body=None, key=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **auth_headers(key)})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


GENERATE = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}


@pytest.mark.parametrize("key", [None, "", "wrong", KEY[:-1], KEY + "x"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", GENERATE),
        ("/server_info", None),
        ("/abort_request", {"abort_all": True}),
        ("/pause_generation", {}),
        ("/update_weights_from_disk", {"model_path": "/"}),
        ("/begin_weight_update", {}),
        ("/weights_checker", {"action": "checksum"}),
        ("/health_generate", None),
        ("/nowhere", None),
    ],
)
def test_the_engine_refuses_who_has_no_key(fleet, path, body, key):
    assert status(fleet.engine_urls[0] + path, body, key) == 401


def test_health_is_told_to_everybody(fleet):
    assert status(fleet.engine_urls[0] + "/health") == status(fleet.engine_urls[0] + "/ready") == 200


@pytest.mark.parametrize(("path", "body"), [("/generate", GENERATE), ("/workers", None), ("/flush_cache", {})])
def test_the_router_refuses_who_has_no_key(fleet, path, body):
    assert status(fleet.router_url + path, body) == status(fleet.router_url + path, body, "wrong") == 401


def test_the_router_says_why_it_refuses_a_change_of_its_list(fleet, monkeypatch):
    monkeypatch.setattr(fleet.router.built, "_api_key", "wrong")
    with pytest.raises(EngineError, match="HTTP 401") as caught:
        fleet.router.workers()
    assert caught.value.where == f"GET {fleet.router.url}/workers"


def test_a_client_with_the_key_generates_and_controls_and_one_without_is_told_so_at_once(fleet):
    async def ask(key):
        async with EngineClient(fleet.router_url, [], api_key=key, timeout_s=60) as client:
            result = await client.agenerate("a", [1, 2], {"max_new_tokens": 2, "ignore_eos": True})
            await client.abort(["b"])  # asks the router for the engines
            return len(result.output_ids)

    assert asyncio.run(ask(KEY)) == 2
    with pytest.raises(EngineError, match="HTTP 401"):
        asyncio.run(ask(None))
    with fleet.control(30.0) as control:
        control.flush()
        assert list(control.versions().values()) == ["0"]


@pytest.mark.slow
def test_an_engine_that_joins_later_gets_requests_with_the_key(fleet, engine_args, tmp_path):
    late = launch(engine_args(engine_api_key=KEY), 1, str(tmp_path / "late.log"))
    try:
        late.wait_ready(120.0)
        fleet.router.remove(fleet.engine_urls[0])
        fleet.router.add(late.url)
        assert status(fleet.router_url + "/generate", GENERATE, KEY) == 200
        fleet.router.add(fleet.engine_urls[0])
        fleet.router.remove(late.url)
    finally:
        late.stop()


def test_the_key_is_in_no_argument_list_and_in_no_log(fleet):
    for process in [fleet.router.process, *(engine.process for engine in fleet.engines)]:
        assert KEY.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert KEY not in " ".join(process._process.args)  # the router writes over its own a second later
    logs = list(fleet._logs.iterdir())
    assert logs
    assert all(KEY.encode() not in log.read_bytes() for log in logs)


def args_with(**options):
    return compose(CORE_SECTIONS)(**options)


def test_each_run_makes_a_key_of_its_own_unless_it_has_one_or_wants_none():
    first, second = (with_engine_key(args_with()).engine_api_key for _ in range(2))
    assert first != second
    assert len(first) >= 43  # 32 bytes
    assert with_engine_key(args_with(engine_api_key="mine")).engine_api_key == "mine"
    assert with_engine_key(args_with(engine_auth=False)).engine_api_key is None
    external = args_with(router_url="http://r:1", engine_urls=["http://e:1"])
    assert with_engine_key(external).engine_api_key is None


def test_a_server_forgets_the_variable_and_takes_an_empty_one_for_none():
    environ = {KEY_VARIABLE: "k", "OTHER": "x"}
    assert (pop_key(environ), pop_key(environ), environ) == ("k", None, {"OTHER": "x"})
    assert pop_key({KEY_VARIABLE: ""}) is None
    assert KEY_VARIABLE not in os.environ
