"""Engines that run elsewhere, behind a router of the run's own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.process import ChildProcess, base_url, reserved_port, with_engine_key
from buffer_rl.embedded.launcher import EmbeddedEngine
from buffer_rl.embedded.launcher import launch as launch_embedded
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.external import ExternalEngine, launch, urls_of
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.errors import ConfigError, DeadlineError, EngineError
from buffer_rl.options.section import compose
from buffer_rl.plan.counts import with_counts
from buffer_rl.testing.fake_engine import FakeEngine
from buffer_rl.weights.options import engines_may_differ
from harness.processes import holds_within

Options = compose(CORE_SECTIONS)


def test_addresses_choose_and_count_the_engines_and_no_key_is_made_for_them() -> None:
    args: Any = with_counts(Options(rollout_external_engine_addrs=["10.0.0.7:30000", "http://10.0.0.8:30000/"]))
    assert (args.rollout_engine, args.rollout_num_engines) == ("external", 2)
    assert urls_of(args) == ["http://10.0.0.7:30000", "http://10.0.0.8:30000"]
    assert [launch(args, index, "").url for index in range(2)] == urls_of(args)
    assert with_engine_key(args).engine_api_key is None
    assert engines_may_differ(args)
    with pytest.raises(ConfigError, match="--rollout-num-engines is 3, and --rollout-external-engine-addrs"):
        with_counts(Options(rollout_external_engine_addrs=["a:1"], rollout_num_engines=3))
    with pytest.raises(ConfigError, match="would start engines of 'sglang', and those at these addresses run"):
        with_counts(Options(rollout_external_engine_addrs=["a:1"], rollout_engine="sglang"))


def test_one_that_does_not_answer_is_named_and_one_that_never_has_is_waited_for() -> None:
    engine = ExternalEngine("http://127.0.0.1:1")
    with pytest.raises(DeadlineError, match="did not answer within 0 s") as caught:
        engine.wait_ready(0.0)
    assert caught.value.where == "http://127.0.0.1:1"
    engine.check()
    with FakeEngine() as fake:
        engine = ExternalEngine(fake.url)
        engine.wait_ready(10.0)
        engine.check()
    with pytest.raises(EngineError, match="nothing listens there"):
        engine.check()


@pytest.mark.slow
def test_requests_go_through_the_runs_router_and_the_run_ends_no_engine(
    engine_args: Callable[..., Any], tmp_path: Path
) -> None:
    args = engine_args()
    outside = [launch_embedded(args, index, str(tmp_path / f"{index}.log")) for index in range(2)]
    for engine in outside:
        engine.wait_ready(60)
    try:
        external = engine_args(
            rollout_engine="external",
            rollout_external_engine_addrs=[engine.url.removeprefix("http://") for engine in outside],
            rollout_num_engines=2,
        )
        with EngineFleet(external, str(tmp_path / "run"), launch) as fleet:
            fleet.wait_ready()
            assert fleet.router is not None
            assert set(fleet.router.workers()) == {engine.url for engine in outside}
            assert len(asyncio.run(sampled(fleet)).output_ids) == 3
            outside[0].stop()
            assert holds_within(60, lambda: set(fleet.router.workers()) == {outside[1].url})  # type: ignore[union-attr]
            assert len(asyncio.run(sampled(fleet)).output_ids) == 3
        for engine in outside[1:]:
            engine.check()  # the run did not end it
    finally:
        for engine in outside:
            engine.stop()


def start_at(args: Any, port: int, log_path: Path) -> EmbeddedEngine:
    """An embedded engine at a port that is kept for it and its successor."""
    where = ["--model-path", args.hf_checkpoint, "--port", str(port)]
    command = [sys.executable, "-m", "buffer_rl.embedded.server", *where, "--deterministic"]
    return EmbeddedEngine(base_url("127.0.0.1", port), ChildProcess("a server", command, str(log_path)))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stopped", "another server"])
def test_one_that_is_away_for_a_while_is_off_the_routers_list_and_comes_back_with_the_weights_of_meanwhile(
    engine_args: Callable[..., Any], model_folder: Callable[..., str], tmp_path: Path, way: str
) -> None:
    args, notices = engine_args(), []
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port("127.0.0.1")).getsockname()[1]
        away = start_at(args, port, tmp_path / "0.log")
        stays = launch_embedded(args, 1, str(tmp_path / "1.log"))
        for engine in (away, stays):
            stack.callback(engine.stop)
            engine.wait_ready(60)
        external = engine_args(
            rollout_engine="external",
            rollout_external_engine_addrs=[away.url, stays.url],
            rollout_num_engines=2,
            rollout_health_check_timeout=5.0,
        )
        fleet = stack.enter_context(EngineFleet(external, str(tmp_path / "run"), launch, notices.append))
        fleet.wait_ready()
        control = fleet.control(600.0)
        stack.callback(control.close)

        def publish(seed: int, version: int) -> set[str]:
            control.pause()
            control.update_weights_from_disk(model_folder("qwen3", seed=seed), version)
            taken = control.versions()
            assert set(taken.values()) == {str(version)}
            control.resume()
            return set(taken)

        def listed() -> set[str]:
            assert fleet.router is not None
            fleet.check()
            return set(fleet.router.workers())

        assert publish(1, 7) == {away.url, stays.url}
        if way == "stopped":
            os.kill(away.process.pid, signal.SIGSTOP)
            stack.callback(os.kill, away.process.pid, signal.SIGCONT)
        else:
            away.stop()
        assert publish(2, 8) == {stays.url}  # no call stays open until its deadline
        assert holds_within(60, lambda: bool(notices))
        assert "the run goes on with 1 engine until it answers again" in notices[0]
        assert holds_within(60, lambda: listed() == {stays.url})
        assert len(asyncio.run(sampled(fleet)).output_ids) == 3
        if way == "stopped":
            os.kill(away.process.pid, signal.SIGCONT)
        else:
            stack.callback(start_at(args, port, tmp_path / "again.log").stop)
        assert holds_within(90, lambda: listed() == {away.url, stays.url})
        assert holds_within(60, lambda: notices[1:] == ["engine 0 is back, with the weights of version 8"])
        both = stack.enter_context(EngineControlClient([away.url, stays.url]))
        assert set(both.versions().values()) == {"8"}
        assert len(set(both.checksums().values())) == 1
        assert publish(1, 9) == {away.url, stays.url}


async def sampled(fleet: EngineFleet) -> Any:
    async with EngineClient(fleet.router_url, [], timeout_s=60) as client:
        return await client.agenerate("r", [5, 6, 7], {"max_new_tokens": 3, "ignore_eos": True})
