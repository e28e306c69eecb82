"""Which engine each request reaches: the real routers under their policies, in front of scripted engines."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.engines.router import RouterPackage, launch
from buffer_rl.errors import ConfigError, EngineError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.testing.fake_engine import FakeEngine
from harness.processes import holds_within

NUM_ENGINES = 3


class Held(FakeEngine):
    """Answers while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = threading.Event()
        self.is_open.set()

    async def _decoded(self, row: dict[str, Any]) -> Any:
        while not self.is_open.is_set():  # noqa: ASYNC110 (set by another thread)
            await asyncio.sleep(0.01)
        return await super()._decoded(row)


class Routed:
    """A router and its engines. Each call of ``ask`` tells which engine it reached."""

    def __init__(self, client: EngineClient, engines: list[Held]) -> None:
        self._client, self._engines, self._asked = client, engines, 0

    async def ask(self, prompt: int, key: str | None, num_rows: int = 1) -> int:
        self._asked += 1
        rid, ids = f"r{self._asked}-", [prompt] * 64
        if num_rows > 1:
            await self._client.agenerate_rows(rid, ids, num_rows, {}, routing_key=key)
        else:
            await self._client.agenerate(rid, ids, {}, routing_key=key)
        logs = [[body["rid"].startswith(rid) for body in engine.log.requests] for engine in self._engines]
        (reached,) = [index for index, found in enumerate(logs) if any(found)]
        return reached

    async def at_once(self, *asked: tuple[int, str | None]) -> list[int]:
        """Each has come before the next is sent, and all before the first is answered."""
        for engine in self._engines:
            engine.is_open.clear()
        answers = []
        try:
            for each in asked:
                before = self._num_requests()
                answers.append(asyncio.create_task(self.ask(*each)))
                assert await asyncio.to_thread(holds_within, 30, lambda: self._num_requests() > before)  # noqa: B023
            assert not any(answer.done() for answer in answers), "an engine that is closed has answered"
        finally:
            for engine in self._engines:
                engine.is_open.set()
        return await asyncio.gather(*answers)

    def _num_requests(self) -> int:
        return sum(len(engine.log.requests) for engine in self._engines)


@pytest.fixture(params=["sglang", "smg"])
def package(request: pytest.FixtureRequest) -> RouterPackage:
    if request.param == "smg":
        pytest.importorskip("smg")
    return cast("RouterPackage", PluginRegistry().resolve("router", request.param))


@pytest.fixture
def routed(tmp_path: Path, package: RouterPackage, engine_args: Callable[..., Any]) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(policy: str, **arguments: Any) -> AsyncIterator[Routed]:
        with ExitStack() as stack:
            engines = [stack.enter_context(Held()) for _ in range(NUM_ENGINES)]
            router = package(engine_args(router_policy=policy, router_args=arguments), str(tmp_path / "log"))
            stack.callback(router.stop)
            await asyncio.to_thread(router.wait_ready, 30)
            await asyncio.to_thread(router.add, *(engine.url for engine in engines))
            async with EngineClient(router.url, []) as client:
                yield Routed(client, engines)

    return start


KEYS = [f"session {number}" for number in range(12)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["manual", "consistent_hashing"])
async def test_equal_keys_reach_one_engine_whatever_the_prompts_are(routed: Any, policy: str) -> None:
    async with routed(policy) as router:
        first = await router.at_once(*((number, key) for number, key in enumerate(KEYS)))
        assert await router.at_once(*((90 - number, key) for number, key in enumerate(KEYS))) == first
        assert [await router.ask(50, key, num_rows=4) for key in KEYS[:4]] == first[:4]
        if policy == "manual":  # a new key begins where the fewest requests are
            assert sorted(first) == [0] * 4 + [1] * 4 + [2] * 4
        else:
            assert len(set(first)) > 1
        without = await router.at_once(*[(7, None)] * 6)  # by the prompt
        assert len(set(without)) == 1


@pytest.mark.slow
async def test_round_robin_takes_the_engines_in_turns_whatever_the_keys_are(routed: Any) -> None:
    async with routed("round_robin") as router:
        reached = [await router.ask(1, "same") for _ in range(6)]
    assert reached[:3] == reached[3:]
    assert sorted(reached[:3]) == [0, 1, 2]


@pytest.mark.slow
async def test_cache_aware_sends_a_prompt_where_it_was_unless_that_engine_has_much_more_to_do(routed: Any) -> None:
    async with routed("cache_aware", balance_abs_threshold=1000, balance_rel_threshold="1000") as router:
        assert len(set(await router.at_once(*((5, key) for key in KEYS)))) == 1
    async with routed("cache_aware", balance_abs_threshold=2, balance_rel_threshold="1.1") as router:
        assert len(set(await router.at_once(*((5, key) for key in KEYS)))) > 1


async def test_power_of_two_spreads_requests_though_no_engine_is_there_when_the_router_starts(routed: Any) -> None:
    async with routed("power_of_two") as router:
        assert len(set(await router.at_once(*[(5, "same")] * 12))) > 1


def test_the_router_of_a_run_has_the_policy_and_the_arguments_of_its_options(
    engine_args: Callable[..., Any], tmp_path: Path
) -> None:
    def started(args: Any, index: int, log_path: str) -> Any:
        nothing = lambda *_: None  # noqa: E731
        return SimpleNamespace(url=engines[index].url, wait_ready=nothing, stop=nothing, check=nothing)

    with ExitStack() as stack:
        engines = [stack.enter_context(FakeEngine()) for _ in range(2)]
        options = {"router_policy": "round_robin", "router_args": {"log_dir": str(tmp_path / "own")}}
        fleet = stack.enter_context(EngineFleet(engine_args(rollout_num_engines=2, **options), str(tmp_path), started))
        fleet.wait_ready()

        async def ask_twice() -> None:
            async with EngineClient(fleet.router_url, []) as client:
                for rid in ("a", "b"):
                    await client.agenerate(rid, [5], {})

        asyncio.run(ask_twice())
        assert [engine.log.num_posts for engine in engines] == [1, 1]
    assert (tmp_path / "own").is_dir()


def test_arguments_of_the_router_have_its_names_and_form(package: RouterPackage) -> None:
    given = {"cache_threshold": "0.5", "max_idle_secs": 60, "disable_health_check": True, "dp_aware": False}
    flags = ["--cache-threshold", "0.5", "--max-idle-secs", "60", "--disable-health-check"]
    assert package.arguments(given) == flags
    assert package.arguments({}) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache_treshold": 0.5}, "unrecognized arguments: --router-cache-treshold 0.5"),
        ({"cache_threshold": "high"}, "--router-cache-threshold.*: invalid float value: 'high'"),
        ({"assignment_mode": "best"}, "--router-assignment-mode: invalid choice: 'best'"),
        ({"port": 1}, "unrecognized arguments: --router-port"),
        ({"request_timeout_secs": 5}, "use --generate-timeout-s"),
    ],
)
def test_an_argument_that_the_router_refuses_or_the_run_sets_is_refused_before_it_starts(
    given: dict[str, Any], message: str, package: RouterPackage
) -> None:
    with pytest.raises(ConfigError, match=message):
        package.arguments(given)


def test_a_router_whose_package_is_not_there_is_refused_with_what_to_install() -> None:
    absent = dataclasses.replace(launch, package="smg_not_here")
    with pytest.raises(ConfigError, match=r"No module named 'smg_not_here'") as caught:
        absent.arguments({})
    assert "pip install 'buffer-rl[smg_not_here]'" in str(caught.value)


def test_fields_that_a_router_does_not_know_reach_the_engine_as_it_says(
    tmp_path: Path, package: RouterPackage, engine_args: Callable[..., Any]
) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(FakeEngine())
        router = package(engine_args(), str(tmp_path / "log"))
        stack.callback(router.stop)
        router.wait_ready(30)
        router.add(engine.url)
        ours = {"return_sampling_mask": True, "session_id": "a", "field_of_ones_own": [1, {"b": 2}]}
        bias = {"logit_bias": {"5": 1.0}, "parameter_of_ones_own": [1]}
        body = {"rid": "r", "input_ids": [5], "sampling_params": {"max_new_tokens": 2, **bias}, **ours}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{router.url}/generate", json.dumps(body).encode(), headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            assert answer.status == 200
        (seen,) = engine.log.requests
    passed = {name: seen[name] for name in ours if name in seen}
    assert passed == (ours if package.passes_fields else {})
    assert seen["sampling_params"] == {"max_new_tokens": 2, **(bias if package.passes_fields else {})}


@pytest.mark.parametrize(("router", "engine_urls"), [("sglang", []), ("smg", []), ("smg", ["http://somebody:1"])])
async def test_a_parameter_that_the_router_would_drop_is_refused_with_the_router_that_does_not(
    engine_args: Callable[..., Any], router: str, engine_urls: list[str]
) -> None:
    with FakeEngine() as engine:
        args = engine_args(router_url=engine.url, router=router, engine_urls=engine_urls)
        async with EngineClient.from_args(args) as client:
            asked = client.agenerate("a", [5], {"max_new_tokens": 2, "logit_bias": {"5": 1.0}})
            if router == "smg" and not engine_urls:
                await asked
                assert engine.log.requests[0]["sampling_params"] == {"max_new_tokens": 2, "logit_bias": {"5": 1.0}}
            else:
                with pytest.raises(EngineError, match=r"(?s)does not forward .*'logit_bias'.*add --router smg"):
                    await asked
                assert engine.log.requests == []


async def test_a_request_that_runs_goes_on_when_its_engine_leaves_the_list_which_takes_it_back_at_once(
    tmp_path: Path, package: RouterPackage, engine_args: Callable[..., Any]
) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(Held())
        router = package(engine_args(), str(tmp_path / "log"))
        stack.callback(router.stop)
        await asyncio.to_thread(router.wait_ready, 30)
        await asyncio.to_thread(router.add, engine.url)
        async with EngineClient(router.url, []) as client:
            engine.is_open.clear()
            answer = asyncio.create_task(client.agenerate("a", [5, 6], {"max_new_tokens": 2}))
            assert await asyncio.to_thread(holds_within, 30, lambda: engine.log.requests)
            began = time.monotonic()
            await asyncio.to_thread(router.remove, engine.url)
            await asyncio.to_thread(router.add, engine.url)
            assert time.monotonic() - began < 4.0  # smg by itself: 5 s and a refusal
            engine.is_open.set()
            assert (await answer).output_ids == [6, 5]
        assert engine.log.num_posts == 1
