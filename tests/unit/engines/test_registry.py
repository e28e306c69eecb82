"""Who of a fleet can serve, and who is gone."""

from __future__ import annotations

from buffer_rl.engines.registry import EngineRegistry, Published
from buffer_rl.engines.replica import EngineState, Replica
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


def replica(index: int, state: EngineState) -> Replica:
    return Replica(index=index, engine=Process(f"http://engine-{index}"), state=state)


def test_an_engine_starves_where_it_waits_for_weights_that_were_published_and_no_other_one_serves():
    waiting, serving = replica(0, EngineState.WAITING), replica(1, EngineState.SUSPECT)
    registry = EngineRegistry(replicas=[waiting, serving], published=Published(version="3", folder=None))
    assert registry.starved_version() is None
    registry.remove(serving)
    assert registry.starved_version() == 3
    with registry.publication:
        assert registry.starved_version() is None
    registry.published = None
    assert registry.starved_version() is None
    registry = EngineRegistry(
        replicas=[replica(0, EngineState.RESTARTING)], published=Published(version="3", folder="")
    )
    assert registry.starved_version() is None


def test_an_engine_is_gone_once_it_has_died_or_left():
    alive, dead = replica(0, EngineState.SERVING), replica(1, EngineState.SERVING)
    dead.engine.ended = True
    registry = EngineRegistry(replicas=[alive, dead])
    assert not registry.is_gone(alive.url)
    assert registry.is_gone(dead.url)
    registry.remove(alive)
    assert registry.is_gone(alive.url)
    assert registry.all() == [dead]
