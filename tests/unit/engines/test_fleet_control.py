"""Publications while engines die and are replaced, on engines that are scripted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.registry import EngineEvent, EngineRegistry, EngineState, Published, Replica
from buffer_rl.errors import DeadlineError, EngineError
from buffer_rl.testing.fake_engine import FakeEngine, Fault
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.publish import Publisher
from harness.fake_roles import local_senders

CLOSED_URL = "http://127.0.0.1:9"  # the port of the discard service, which the system gives to no process


@pytest.fixture(autouse=True)
def deaths_show_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted ones do; with real processes a call that failed waits a second for the kernel's word."""
    monkeypatch.setattr("buffer_rl.engines.registry.DEATH_TIMEOUT_S", 0.02)


class Scripted:
    """An engine process that is dead when the test says so."""

    def __init__(self, url: str, dead: Callable[[], bool] = lambda: False) -> None:
        self.url = url
        self.dead = dead

    def wait_ready(self, timeout_s: float) -> None:
        return

    def check(self) -> None:
        if self.dead():
            raise EngineError("the engine was killed", where="engine.log")

    def stop(self) -> None:
        return


def replica(index: int, url: str, state: EngineState = EngineState.SERVING, **more) -> Replica:
    return Replica(index=index, engine=Scripted(url, **more), state=state)


OPENED: list[EngineControlClient] = []


@pytest.fixture(autouse=True)
def controls_are_closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def control_of(*replicas: Replica, **timeouts: float) -> tuple[EngineControlClient, EngineRegistry]:
    registry = EngineRegistry(replicas=list(replicas))
    OPENED.append(EngineControlClient(registry, **{"timeout_s": 10.0, **timeouts}))
    return OPENED[-1], registry


def test_a_replacement_that_waits_takes_part_in_the_publication_and_joins_at_its_end():
    with FakeEngine(version=4) as old, FakeEngine(version=4) as new, FakeEngine(version=0) as late:
        waiting = replica(1, new.url, EngineState.WAITING)
        starting = replica(2, late.url, EngineState.STARTING)
        control, registry = control_of(replica(0, old.url), waiting, starting)
        control.pause()
        starting.state = EngineState.WAITING  # too late for this one
        assert control.versions() == {old.url: "4", new.url: "4"}
        assert waiting.state is EngineState.WAITING
        assert registry.publication.locked()
        control.resume()
    assert waiting.state is EngineState.SERVING
    assert starting.state is EngineState.WAITING
    assert registry.published == Published(version="4", folder=None)
    assert not registry.publication.locked()


def test_engines_that_join_read_the_folder_that_was_prepared_once_it_is_served(monkeypatch: pytest.MonkeyPatch):
    with FakeEngine(version=4) as engine:
        control, registry = control_of(replica(0, engine.url))
        posted: list[str] = []
        monkeypatch.setattr(control, "post", lambda path, *_, **__: posted.append(path))
        control.prepare_weight_update("weights/v000004", version=4)
        control.pause()
        control.serve_prepared("weights/v000004")
        control.versions()
        control.resume()
        assert posted == ["/prepare_weight_update", "/end_weight_update", "/continue_generation"]
        assert registry.published == Published(version="4", folder="weights/v000004")


def test_nobody_joins_a_fleet_whose_engines_differ():
    with FakeEngine(version=4) as old, FakeEngine(version=0) as new:
        waiting = replica(1, new.url, EngineState.WAITING)
        control, registry = control_of(replica(0, old.url), waiting)
        control.pause()
        control.versions()
        control.resume()
    assert (waiting.state, registry.published) == (EngineState.WAITING, None)


def test_an_engine_that_dies_in_the_middle_does_not_fail_the_publication_for_the_others():
    died: list[bool] = []
    with FakeEngine(version=5) as first:
        with FakeEngine(version=5) as second:
            control, registry = control_of(replica(0, first.url), replica(1, second.url, dead=lambda: bool(died)))
            control.pause()
        died.append(True)
        control.flush()
        assert control.versions() == {first.url: "5"}
        control.resume()
    assert registry.published == Published(version="5", folder=None)


def test_an_engine_that_lives_and_does_not_answer_fails_the_publication():
    with FakeEngine() as engine:
        url = CLOSED_URL
        control, registry = control_of(replica(0, engine.url), replica(1, url))
        with pytest.raises(EngineError, match="ClientConnector") as caught:
            control.pause()
        assert url in str(caught.value)
        with pytest.raises(EngineError):
            control.resume()
        assert registry.publication.locked()
        control.end_publication()
    assert not registry.publication.locked()


def test_an_attempt_whose_engines_all_died_shows_the_last_ones_end():
    control, _ = control_of(replica(0, CLOSED_URL, dead=lambda: True), replica(1, CLOSED_URL, dead=lambda: True))
    with pytest.raises(EngineError, match=r"the engine was killed") as caught:
        control.pause()
    assert caught.value.where == "engine.log"


def test_a_publication_waits_for_an_engine_that_joins_with_a_deadline():
    with FakeEngine() as engine:
        control, registry = control_of(replica(0, engine.url), timeout_s=0.05)
        with registry.publication, pytest.raises(DeadlineError, match="joins"):
            control.pause()
        control.end_publication()  # as the publisher does, whatever failed
    assert not registry.publication.locked()


def publisher(control: EngineControlClient, folder: Path, notices: list[str]) -> Publisher:
    args: Any = SimpleNamespace(
        run_dir=str(folder), update_weight_disk_dir=None, publish_delta=False, hf_checkpoint=str(folder)
    )
    trainer = local_senders(DiskTransport, args, lambda: iter(()))
    return Publisher(DiskTransport(args), trainer, control, first_pause_s=0.0, notice=notices.append)


def published_version(registry: EngineRegistry) -> str | None:
    return None if registry.published is None else registry.published.version


CALLS = ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", [Fault.SERVER_ERROR, Fault.RESET])
def test_one_failed_call_of_one_engine_costs_an_attempt_and_no_engine(tmp_path: Path, call: str, fault: Fault):
    met: list[str] = []
    notices: list[str] = []

    def once(asked: str) -> Fault | None:
        if asked != call or met:
            return None
        met.append(asked)
        return fault

    with FakeEngine() as well, FakeEngine(control_fault=once) as failing:
        control, registry = control_of(replica(0, well.url), replica(1, failing.url))
        publisher(control, tmp_path, notices).publish(1)
        assert (well.version, failing.version) == (1, 1)
    assert [replica.error() for replica in registry.all()] == [None, None]
    assert published_version(registry) == "1"
    assert len(notices) == 1
    assert call in notices[0]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", [EngineState.SERVING, EngineState.WAITING])
def test_an_engine_that_fails_every_attempt_is_given_up_and_the_others_go_on(
    tmp_path: Path, call: str, state: EngineState
):
    def always(asked: str) -> Fault | None:
        return Fault.SERVER_ERROR if asked == call else None

    with FakeEngine() as well, FakeEngine(control_fault=always) as failing:
        broken = replica(1, failing.url, state)
        control, registry = control_of(replica(0, well.url), broken)
        publisher(control, tmp_path, []).publish(1)
        assert well.version == 1
    assert "engine 1 failed the last attempt of a publication" in str(broken.error())
    assert registry.all()[0].error() is None
    assert published_version(registry) == "1"
    assert broken.state is EngineState.QUARANTINED
    assert not registry.publication.locked()


def test_an_engine_is_given_up_by_the_last_attempt_alone_and_only_where_another_one_answers(tmp_path: Path):
    def always(asked: str) -> Fault | None:
        return Fault.SERVER_ERROR if asked == "/pause_generation" else None

    with FakeEngine(control_fault=always) as first, FakeEngine(control_fault=always) as second:
        control, registry = control_of(replica(0, first.url), replica(1, second.url))
        with pytest.raises(EngineError, match="2 of 2 engines failed"):
            publisher(control, tmp_path, []).publish(1)
        assert [replica.error() for replica in registry.all()] == [None, None]
        with pytest.raises(EngineError):
            control.pause()
        control.end_publication()
    assert [replica.error() for replica in registry.all()] == [None, None]
    assert not registry.publication.locked()


def test_an_engine_that_comes_round_in_the_last_attempt_has_three_again_in_the_next_publication(tmp_path: Path):
    faults = [Fault.SERVER_ERROR, Fault.SERVER_ERROR]

    def while_there_are_any(asked: str) -> Fault | None:
        return faults.pop() if asked == "/pause_generation" and faults else None

    with FakeEngine() as well, FakeEngine(control_fault=while_there_are_any) as failing:
        control, registry = control_of(replica(0, well.url), replica(1, failing.url))
        for version in (1, 2):
            publisher(control, tmp_path, []).publish(version)
            assert (well.version, failing.version) == (version, version)
            faults.append(Fault.SERVER_ERROR)
    assert [replica.error() for replica in registry.all()] == [None, None]


class Stale(FakeEngine):
    """Takes an update and keeps its version."""

    async def _update(self, request: Any) -> Any:
        answer = await super()._update(request)
        self.version = 0
        return answer


def test_an_engine_that_takes_the_weights_and_keeps_its_version_is_given_up_and_never_continued(tmp_path: Path):
    continued: list[str] = []

    def note(asked: str) -> None:
        continued.extend([asked] if asked == "/continue_generation" else [])

    notices: list[str] = []
    with FakeEngine() as well, Stale(control_fault=note) as stale:
        control, registry = control_of(replica(0, well.url), replica(1, stale.url))
        publisher(control, tmp_path, notices).publish(1)
        assert well.version == 1
    assert published_version(registry) == "1"
    assert "failed the last attempt" in str(registry.all()[1].error())
    assert continued == []
    assert len(notices) == 2
    assert "report other weights than version 1" in notices[1]


class LeavesOpen(FakeEngine):
    """Answers every call but an update, which it leaves open."""

    async def _update(self, request: Any) -> Any:
        await asyncio.Event().wait()


def test_an_engine_that_answers_health_and_leaves_a_call_open_is_given_up_at_that_calls_deadline(tmp_path: Path):
    notices: list[str] = []
    with FakeEngine() as well, LeavesOpen() as hanging:
        control, registry = control_of(replica(0, well.url), replica(1, hanging.url), timeout_s=2.0)
        publisher(control, tmp_path, notices).publish(1)
        assert (well.version, len(well.log.updates)) == (1, 1)
    assert "engine 1 hangs in a publication: no answer within 2 s" in str(registry.all()[1].error())
    assert registry.all()[0].error() is None
    assert published_version(registry) == "1"
    assert notices == []


def test_an_engine_that_is_given_up_between_publications_is_not_waited_for():
    """What engines can do is asked before they are paused, and nobody holds the fleet then."""
    asked = threading.Event()

    class Silent(FakeEngine):
        async def _info(self, request: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

    with FakeEngine() as well, Silent() as silent:
        lost = replica(1, silent.url)
        control, _ = control_of(replica(0, well.url), lost, timeout_s=60.0)
        ends = threading.Thread(target=lambda: asked.wait(30) and lost.end(EngineError("it is silent")))
        ends.start()
        began = time.monotonic()
        assert list(control.server_info()) == [well.url]
        ends.join()
    assert time.monotonic() - began < 30


def test_an_engine_that_is_not_replaced_fails_the_publication_and_is_called_again_in_the_next(tmp_path: Path):
    faults = [Fault.SERVER_ERROR] * 3

    def while_there_are_any(asked: str) -> Fault | None:
        return faults.pop() if asked == "/flush_cache" and faults else None

    with FakeEngine() as well, FakeEngine(control_fault=while_there_are_any) as failing:
        with EngineControlClient([well.url, failing.url]) as control:
            with pytest.raises(EngineError, match=failing.url):
                publisher(control, tmp_path, []).publish(1)
            assert not control.drop([failing.url])
            publisher(control, tmp_path, []).publish(1)
        assert (well.version, failing.version) == (1, 1)


def test_an_engine_that_is_not_replaced_and_leaves_a_call_open_fails_the_call():
    with FakeEngine() as well, LeavesOpen() as hanging:
        control = EngineControlClient([well.url, hanging.url], timeout_s=0.5)
        with control, pytest.raises(EngineError, match=r"no answer within 0\.5 s"):
            control.update_weights_from_disk("folder", 1)
        assert control.targets() == [well.url, hanging.url]


@pytest.mark.slow
def test_where_all_engines_leave_a_call_open_none_is_given_up(tmp_path: Path):
    with LeavesOpen() as one, LeavesOpen() as two:
        control, registry = control_of(replica(0, one.url), replica(1, two.url), timeout_s=1.0)
        with pytest.raises(EngineError, match="2 of 2 engines failed"):
            publisher(control, tmp_path, []).publish(1)
    assert [replica.error() for replica in registry.all()] == [None, None]


def test_where_all_engines_keep_their_version_none_is_given_up_and_the_publication_fails(tmp_path: Path):
    with Stale() as one, Stale() as two:
        control, registry = control_of(replica(0, one.url), replica(1, two.url))
        with pytest.raises(EngineError, match="report other weights than version 1"):
            publisher(control, tmp_path, []).publish(1)
    assert [replica.error() for replica in registry.all()] == [None, None]
    assert registry.published is None


def test_a_publication_for_which_nobody_is_left_is_an_error_and_not_an_empty_success():
    control, _ = control_of()
    with pytest.raises(EngineError, match="there is no engine to ask"):
        control.pause()
    control.end_publication()


def test_a_publication_without_an_engine_waits_for_a_replacement_and_lets_it_take_the_newest_weights(tmp_path: Path):
    notices: list[str] = []
    died: list[bool] = []
    with FakeEngine(version=4) as lost, FakeEngine(version=4) as new:

        def die(asked: str) -> Fault | None:
            died.extend([True] if asked == "/flush_cache" else [])
            return Fault.KILL if died else None

        lost.control_fault, lost.back_after_s = die, 600.0
        first, joining = replica(0, lost.url, dead=lambda: bool(died)), replica(0, new.url, EngineState.LOADING)
        control, registry = control_of(first, start_timeout_s=60.0)

        def replace() -> None:  # as the supervisor, and the thread of the replacement, which needs the lock
            while not died:
                time.sleep(0.01)
            registry.remove(first)
            registry.add(joining)
            with registry.publication:
                joining.note(EngineEvent.HAS_WEIGHTS)

        thread = threading.Thread(target=replace)
        thread.start()
        publisher(control, tmp_path, notices).publish(5)
        thread.join()
        assert new.version == 5
    assert published_version(registry) == "5"
    assert len(notices) == 1
    assert "the engine was killed" in notices[0]


def test_a_publication_ends_where_no_engine_will_come_or_none_came_in_time():
    control, registry = control_of(start_timeout_s=0.05)
    with pytest.raises(DeadlineError, match="no engine came in place of those that died"):
        control.wait_for_engine()
    registry.over = EngineError("no engine is left: it was killed")
    with pytest.raises(EngineError, match="no engine is left"):
        control.wait_for_engine()
