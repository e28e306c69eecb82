"""The supervisor of engines that are scripted: launches that fail, and what it cannot mend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from buffer_rl.engines.registry import EngineRegistry
from buffer_rl.engines.replica import EngineState, Replica
from buffer_rl.engines.supervisor import Supervisor
from buffer_rl.errors import DeadlineError, EngineError
from harness.processes import holds_within


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
