"""The states of an engine: every transition, and the time that silence takes to become death. Who of a fleet can serve,
and who is gone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from buffer_rl.engines.registry import EngineEvent, EngineRegistry, EngineState, Published, Replica
from buffer_rl.errors import EngineError

S, E = EngineState, EngineEvent
LIVE = [S.STARTING, S.RESTARTING, S.LOADING, S.WAITING, S.SERVING, S.SUSPECT]
TAKEN = {
    (S.STARTING, E.HAS_WEIGHTS): S.SERVING,
    (S.RESTARTING, E.ANSWERED): S.LOADING,
    (S.LOADING, E.NEEDS_WEIGHTS): S.WAITING,
    (S.LOADING, E.HAS_WEIGHTS): S.SERVING,
    (S.WAITING, E.HAS_WEIGHTS): S.SERVING,
    (S.SERVING, E.PROBE_FAILED): S.SUSPECT,
    (S.SUSPECT, E.PROBE_ANSWERED): S.SERVING,
    **{(state, E.REFUSED): S.QUARANTINED for state in LIVE},
    **{(state, E.ENDED): S.DEAD for state in LIVE},
}


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


def replica(state: EngineState, index: int = 3, **more: Any) -> Replica:
    return Replica(index=index, engine=Process(f"http://engine-{index}"), state=state, **more)


@pytest.mark.parametrize(("before", "event"), list(product(S, E)))
def test_every_event_in_every_state_leads_where_the_table_says_and_is_told_once(before: S, event: E) -> None:
    told: list[tuple[int, S, S, str]] = []
    one = replica(before, on_change=lambda who, old, why: told.append((who.index, old, who.state, why)))
    after = TAKEN.get((before, event), before)
    assert one.note(event, "why") is (after is not before)
    assert one.state is after
    assert told == ([(3, before, after, "why")] if after is not before else [])


@pytest.mark.parametrize("state", [S.SERVING, S.WAITING, S.LOADING])
def test_silence_is_counted_from_the_first_probe_that_failed_and_ends_with_an_answer(state: S) -> None:
    one = replica(state)
    assert one.probed(True, 10.0) == 0.0
    assert [one.probed(False, now) for now in (20.0, 25.0, 31.0)] == [0.0, 5.0, 11.0]
    assert one.state is (S.SUSPECT if state is S.SERVING else state)
    assert one.probed(True, 32.0) == 0.0
    assert one.state is state
    assert one.probed(False, 40.0) == 0.0


@pytest.mark.parametrize(("event", "state"), [(E.ENDED, S.DEAD), (E.REFUSED, S.QUARANTINED)])
def test_the_first_failure_stays_and_no_answer_brings_an_ended_engine_back(event: E, state: S) -> None:
    one = replica(S.SUSPECT)
    first, second = EngineError("first\nits log"), EngineError("second")
    one.end(first, event)
    one.end(second)
    assert one.probed(True, 1.0) == 0.0
    assert (one.state, one.error()) == (state, first)


def test_an_engine_is_found_dead_when_its_process_has_ended() -> None:
    one = replica(S.SERVING)
    assert one.error() is None
    one.engine.ended = True  # type: ignore[attr-defined]
    assert "it was killed" in str(one.error())
    assert one.state is S.DEAD


def test_an_engine_starves_where_it_waits_for_weights_that_were_published_and_no_other_one_serves():
    waiting, serving = replica(S.WAITING, 0), replica(S.SUSPECT, 1)
    registry = EngineRegistry(replicas=[waiting, serving], published=Published(version="3", folder=None))
    assert registry.starved_version() is None
    registry.remove(serving)
    assert registry.starved_version() == 3
    with registry.publication:
        assert registry.starved_version() is None
    registry.published = None
    assert registry.starved_version() is None
    registry = EngineRegistry(replicas=[replica(S.RESTARTING, 0)], published=Published(version="3", folder=""))
    assert registry.starved_version() is None


def test_an_engine_is_gone_once_it_has_died_or_left():
    alive, dead = replica(S.SERVING, 0), replica(S.SERVING, 1)
    dead.engine.ended = True
    registry = EngineRegistry(replicas=[alive, dead])
    assert not registry.is_gone(alive.url)
    assert registry.is_gone(dead.url)
    registry.remove(alive)
    assert registry.is_gone(alive.url)
    assert registry.all() == [dead]
