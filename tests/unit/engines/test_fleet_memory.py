"""Engines of a fleet that free their memory together and take it back, on engines that are scripted and do not survive
to be asked for what they do not have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.protocol import CACHE, WEIGHTS
from buffer_rl.engines.registry import EngineRegistry, EngineState, Published, Replica
from buffer_rl.engines.supervisor import Supervisor
from buffer_rl.errors import DeadlineError, EngineError
from buffer_rl.testing.fake_engine import FakeEngine, Fault
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.publish import Publisher
from harness.fake_roles import local_senders
from harness.processes import holds_within

ALL = (*WEIGHTS, *CACHE)
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


class Process:
    """The process of a scripted engine; ``dies`` says whether it has ended."""

    def __init__(self, url: str, dies: Callable[[], bool] = lambda: False) -> None:
        self.url = url
        self._dies = dies

    def wait_ready(self, timeout_s: float) -> None:
        """It is."""

    def check(self) -> None:
        if self._dies():
            raise EngineError("the engine was killed", where="engine.log")

    def stop(self) -> None:
        """The test does."""


class Noting(FakeEngine):
    """Has the control calls that it was asked in ``asked``; those on ``fails`` are answered 500."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[str] = []

        def note(path: str) -> Fault | None:
            self.asked.append(path)
            return Fault.SERVER_ERROR if path == fails else None

        super().__init__(control_fault=note)


@pytest.fixture(autouse=True)
def deaths_show_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_rl.engines.registry.DEATH_TIMEOUT_S", 0.02)


@pytest.fixture
def fleet() -> Iterator[Callable[..., tuple[EngineControlClient, EngineRegistry]]]:
    opened: list[EngineControlClient] = []

    def make(*processes: Any, **states: EngineState) -> tuple[EngineControlClient, EngineRegistry]:
        replicas = [
            Replica(index=i, engine=process, state=states.get(f"engine_{i}", EngineState.SERVING))
            for i, process in enumerate(processes)
        ]
        registry = EngineRegistry(replicas=replicas)
        opened.append(EngineControlClient(registry, timeout_s=10.0))
        return opened[-1], registry

    yield make
    for control in opened:
        control.close()


Fleet = Callable[..., tuple[EngineControlClient, EngineRegistry]]


def publish(control: EngineControlClient, folder: Path, version: int) -> None:
    args: Any = SimpleNamespace(
        run_dir=str(folder), update_weight_disk_dir=None, publish_delta=False, hf_checkpoint=str(folder)
    )
    trainer = local_senders(DiskTransport, args, lambda: iter(()))
    Publisher(DiskTransport(args), trainer, control, first_pause_s=0.0).publish(version)


def test_engines_are_paused_and_flushed_before_they_release_and_go_on_once_they_have_everything(
    fleet: Fleet, tmp_path: Path
) -> None:
    with Noting() as first, Noting() as second:
        control, registry = fleet(Process(first.url), Process(second.url), engine_1=EngineState.WAITING)
        control.release_memory()
        for engine in (first, second):
            assert engine.asked == ["/pause_generation", "/flush_cache", RELEASE]
            assert engine.released == set(ALL)
        assert not registry.has_memory
        assert not registry.publication.locked()
        control.resume_memory(WEIGHTS)
        assert not registry.has_memory
        publish(control, tmp_path, 4)
        for engine in (first, second):
            assert engine.version == 4
            assert "/continue_generation" not in engine.asked  # a request would be run without a cache
        assert [replica.state for replica in registry.all()] == [EngineState.SERVING] * 2
        control.resume_memory(CACHE)
        assert registry.has_memory
        for engine in (first, second):
            assert engine.asked[-2:] == [RESUME, "/continue_generation"]
            assert engine.log.memory == [("release", ALL), ("resume", WEIGHTS), ("resume", CACHE)]
        publish(control, tmp_path, 5)
        assert first.asked[-1] == second.asked[-1] == "/continue_generation"


def test_engines_release_the_kinds_that_are_named_and_go_on_once_they_have_all_of_them(fleet: Fleet) -> None:
    with Noting() as engine:
        control, registry = fleet(Process(engine.url))
        control.release_memory(frozenset(CACHE))
        assert not registry.has_memory
        control.release_memory(frozenset(WEIGHTS))
        control.resume_memory(frozenset(WEIGHTS))
        assert "/continue_generation" not in engine.asked
        control.resume_memory(frozenset(CACHE))
        assert engine.asked[-2:] == [RESUME, "/continue_generation"]
        wanted = [("release", CACHE), ("release", WEIGHTS), ("resume", WEIGHTS), ("resume", CACHE)]
        assert engine.log.memory == wanted


def test_an_engine_that_came_between_is_asked_for_nothing_that_it_did_not_release(fleet: Fleet) -> None:
    with Noting() as old, Noting() as new:
        control, registry = fleet(Process(old.url))
        control.release_memory()
        registry.add(Replica(index=1, engine=Process(new.url), state=EngineState.WAITING))
        control.resume_memory(WEIGHTS)
        control.resume_memory(CACHE)
        assert new.asked == []
        assert old.released == set()


@pytest.mark.parametrize("call", ["/pause_generation", "/flush_cache", RELEASE, RESUME])
def test_an_engine_that_fails_where_others_do_not_is_given_up(fleet: Fleet, call: str) -> None:
    with Noting() as well, Noting(fails=call) as failing:
        control, registry = fleet(Process(well.url), Process(failing.url))
        control.release_memory()
        control.resume_memory(WEIGHTS)
        control.resume_memory(CACHE)
        assert well.released == set()
        good, bad = registry.all()
    assert (good.error(), bad.state) == (None, EngineState.QUARANTINED)
    assert bad.error() is not None
    assert not registry.publication.locked()


def test_the_failure_of_the_only_engine_is_an_error(fleet: Fleet) -> None:
    with Noting(fails=RELEASE) as failing:
        control, registry = fleet(Process(failing.url))
        with pytest.raises(EngineError, match="release_memory_occupation"):
            control.release_memory()
    assert not registry.publication.locked()


def test_the_death_of_all_engines_is_left_to_the_fleet_which_starts_others_after_it(fleet: Fleet) -> None:
    dead: list[bool] = []
    with Noting() as engine:
        control, registry = fleet(Process(engine.url, dies=lambda: bool(dead)))
    dead.append(True)
    control.release_memory()
    assert not registry.has_memory
    control.resume_memory(WEIGHTS)
    assert not registry.has_memory
    registry.over = EngineError("no engine is left")
    with pytest.raises(EngineError):
        control.wait_for_engine()
    assert registry.has_memory  # a publication needs one, although the trainer is awake
    with pytest.raises(EngineError):
        control.release_memory()


def test_engines_release_once_a_replacement_has_joined_and_none_is_started_before_they_have_their_cache(
    fleet: Fleet,
) -> None:
    launched: list[str] = []
    dead: list[str] = []
    released = threading.Event()
    args = SimpleNamespace(
        engine_max_restarts=2,
        engine_start_timeout_s=9.0,
        update_weights_timeout_s=9.0,
        engine_api_key=None,
        rollout_external_engine_addrs=[],
    )

    class Router:
        def add(self, url: str, timeout_s: float) -> None: ...
        def remove(self, url: str) -> None: ...

    with Noting() as first, Noting() as second:
        control, registry = fleet(Process(first.url, dies=lambda: first.url in dead))

        def release() -> None:
            control.release_memory()
            released.set()

        class Loading(Process):
            """The trainer asks for the memory while it loads."""

            def wait_ready(self, timeout_s: float) -> None:
                releasing.start()
                assert holds_within(10, lambda: not registry.has_memory)
                assert not released.wait(0.2)

        def launch(index: int, log: str) -> Any:
            launched.append(log)
            return (Loading if len(launched) == 1 else Process)(second.url, dies=lambda: dead[-1] == second.url)

        releasing = threading.Thread(target=release, daemon=True)
        router: Any = Router()
        supervisor = Supervisor(args, registry, router, launch, lambda line: None)
        supervisor.start()
        try:
            dead.append(first.url)
            assert released.wait(10)
            assert second.asked == ["/pause_generation", "/flush_cache", RELEASE]
            assert [(each.state, each.released) for each in registry.all()] == [(EngineState.SERVING, ALL)]
            registry.published = Published(version="4", folder=None)
            dead.append(second.url)
            assert holds_within(10, lambda: registry.all() == [])
            control.resume_memory(WEIGHTS)
            assert not holds_within(1, lambda: len(launched) > 1)
            dead.append("none")
            control.resume_memory(CACHE)
            assert holds_within(10, lambda: [each.state for each in registry.all()] == [EngineState.WAITING])
            assert registry.starved_version() == 4
            registry.has_memory = False  # it is of the turn that has ended
            assert registry.starved_version() is None
        finally:
            supervisor.stop()
            supervisor.join()
    assert launched == ["engine_0_restart_1.log", "engine_0_restart_2.log"]
    assert second.asked[-1] == RELEASE


def test_an_engine_that_never_starts_is_waited_for_with_a_deadline(fleet: Fleet) -> None:
    with Noting() as engine:
        control, registry = fleet(Process(engine.url))
        assert registry.begin_start()
        with pytest.raises(DeadlineError, match=r"being started took longer than 0\.1 s"):
            registry.hold_starts(0.1)
        registry.end_start()
        control.release_memory()
        assert not registry.begin_start()
