"""Publications while engines die and are replaced, on engines that are scripted."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from buffer_rl.engine.fleet_control import FleetControl
from buffer_rl.engine.roster import Member, MemberState, Published, Roster
from buffer_rl.errors import DeadlineError, EngineError
from buffer_rl.testing.fake_engine import FakeEngine


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


def closed_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def member(index: int, url: str, state: MemberState = MemberState.SERVING, **more) -> Member:
    return Member(index=index, engine=Scripted(url, **more), state=state)


def control_of(*members: Member, timeout_s: float = 10.0) -> tuple[FleetControl, Roster, list[Member]]:
    admitted: list[Member] = []
    roster = Roster(members=list(members))
    return FleetControl(roster, admitted.append, timeout_s=timeout_s), roster, admitted


def test_a_replacement_that_waits_takes_part_in_the_publication_and_joins_at_its_end():
    with FakeEngine(version=4) as old, FakeEngine(version=4) as new, FakeEngine(version=0) as late:
        waiting = member(1, new.url, MemberState.WAITING)
        starting = member(2, late.url, MemberState.STARTING)
        control, roster, admitted = control_of(member(0, old.url), waiting, starting)
        control.pause()
        starting.state = MemberState.WAITING  # too late for this one
        assert control.versions() == {old.url: "4", new.url: "4"}
        assert admitted == []
        assert roster.publication.locked()
        control.resume()
    assert admitted == [waiting]
    assert roster.published == Published(version="4", folder=None)
    assert not roster.publication.locked()


def test_nobody_joins_a_fleet_whose_engines_differ():
    with FakeEngine(version=4) as old, FakeEngine(version=0) as new:
        control, roster, admitted = control_of(member(0, old.url), member(1, new.url, MemberState.WAITING))
        control.pause()
        control.versions()
        control.resume()
    assert (admitted, roster.published) == ([], None)


def test_an_engine_that_dies_in_the_middle_does_not_fail_the_publication_for_the_others():
    died: list[bool] = []
    with FakeEngine(version=5) as first:
        with FakeEngine(version=5) as second:
            control, roster, _ = control_of(member(0, first.url), member(1, second.url, dead=lambda: bool(died)))
            control.pause()
        died.append(True)
        control.flush()
        assert control.versions() == {first.url: "5"}
        control.resume()
    assert roster.published == Published(version="5", folder=None)


def test_an_engine_that_lives_and_does_not_answer_fails_the_publication():
    with FakeEngine() as engine:
        url = closed_url()
        control, roster, _ = control_of(member(0, engine.url), member(1, url))
        with pytest.raises(EngineError, match="ClientConnector") as caught:
            control.pause()
        assert url in str(caught.value)
        with pytest.raises(EngineError):
            control.resume()
    assert not roster.publication.locked()


def test_a_publication_without_an_engine_left_shows_the_last_ones_end():
    control, _, _ = control_of(member(0, closed_url(), dead=lambda: True), member(1, closed_url(), dead=lambda: True))
    with pytest.raises(EngineError, match=r"no engine is left: the engine was killed") as caught:
        control.pause()
    assert caught.value.where == "engine.log"


def test_a_publication_waits_for_an_engine_that_joins_with_a_deadline():
    with FakeEngine() as engine:
        control, roster, _ = control_of(member(0, engine.url), timeout_s=0.05)
        with roster.publication, pytest.raises(DeadlineError, match="joins"):
            control.pause()
        control.resume()  # as the publisher does, whatever failed
    assert not roster.publication.locked()
