"""Who of a fleet can serve, and who is gone."""

from __future__ import annotations

from buffer_rl.engine.registry import EngineRegistry, Replica, ReplicaState
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


def replica(index: int, state: ReplicaState) -> Replica:
    return Replica(index=index, engine=Process(f"http://engine-{index}"), state=state)


def test_an_engine_that_waits_for_weights_counts_only_while_some_are_published():
    serving, waiting = replica(0, ReplicaState.SERVING), replica(1, ReplicaState.WAITING)
    registry = EngineRegistry(replicas=[waiting, serving, replica(2, ReplicaState.STARTING)])
    assert registry.healthy() == [serving]
    serving.engine.ended = True
    assert registry.healthy() == []
    with registry.publication:
        assert registry.healthy() == [waiting]


def test_an_engine_is_gone_once_it_has_died_or_left():
    alive, dead = replica(0, ReplicaState.SERVING), replica(1, ReplicaState.SERVING)
    dead.engine.ended = True
    registry = EngineRegistry(replicas=[alive, dead])
    assert not registry.is_gone(alive.url)
    assert registry.is_gone(dead.url)
    registry.remove(alive)
    assert registry.is_gone(alive.url)
    assert registry.all() == [dead]


def test_an_engine_of_a_launcher_without_check_counts_as_alive_until_it_fails_to_start():
    class Plain:
        url = "http://plain"

        def wait_ready(self, timeout_s: float) -> None:
            return

        def stop(self) -> None:
            return

    plain = Replica(index=0, engine=Plain())
    assert plain.error() is None
    plain.failure = EngineError("it did not start")
    assert plain.error() is plain.failure
