"""Who of a fleet can serve, and who is gone."""

from __future__ import annotations

from buffer_rl.engine.registry import Member, MemberState, Roster
from buffer_rl.errors import EngineError


class Process:
    """An engine process whose end the test decides."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ended = False

    def wait_ready(self, timeout_s: float) -> None:
        return

    def check(self) -> None:
        if self.ended:
            raise EngineError("it was killed")

    def stop(self) -> None:
        return


def member(index: int, state: MemberState) -> Member:
    return Member(index=index, engine=Process(f"http://engine-{index}"), state=state)


def test_an_engine_that_waits_for_weights_counts_only_while_some_are_published():
    serving, waiting = member(0, MemberState.SERVING), member(1, MemberState.WAITING)
    roster = Roster(members=[waiting, serving, member(2, MemberState.STARTING)])
    assert roster.able() == [serving]
    serving.engine.ended = True
    assert roster.able() == []
    with roster.publication:
        assert roster.able() == [waiting]


def test_an_engine_is_gone_once_it_has_died_or_left():
    alive, dead = member(0, MemberState.SERVING), member(1, MemberState.SERVING)
    dead.engine.ended = True
    roster = Roster(members=[alive, dead])
    assert not roster.is_gone(alive.url)
    assert roster.is_gone(dead.url)
    roster.remove(alive)
    assert roster.is_gone(alive.url)
    assert roster.all() == [dead]


def test_an_engine_of_a_launcher_without_check_counts_as_alive_until_it_fails_to_start():
    class Plain:
        url = "http://plain"

        def wait_ready(self, timeout_s: float) -> None:
            return

        def stop(self) -> None:
            return

    plain = Member(index=0, engine=Plain())
    assert plain.death() is None
    plain.failure = EngineError("it did not start")
    assert plain.death() is plain.failure
