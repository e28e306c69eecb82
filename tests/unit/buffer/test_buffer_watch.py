"""When a Buffer counts as hung, and what is done then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.buffer import actor as buffer_actor
from buffer_rl.buffer.actor import watch_buffer
from buffer_rl.cluster import hangs


class Dead(Exception):
    """What Ray says of an actor that is not there."""


class DeadForGood(Dead):
    """What Ray says of one that it does not start again."""


class FakeRay:
    """Ray with one actor, whose ``answer`` is that to every question: a dict, an error, or None for silence."""

    class exceptions:
        RayError = Dead
        ActorDiedError = DeadForGood

    def __init__(self) -> None:
        self.answer: Any = {"busy_s": 0.0, "pid": 1}
        self.killed: list[bool] = []
        self.get_progress = self

    def remote(self) -> FakeRay:
        return self

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return ([], refs) if self.answer is None else (refs, [])

    def get(self, ref: Any, timeout: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def kill(self, actor: Any, no_restart: bool) -> None:
        self.killed.append(no_restart)


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ray = FakeRay()
        for module in (buffer_actor, hangs):
            monkeypatch.setattr(module, "ray", self.ray)
        self.time = 0.0
        self.shown: list[Any] = []
        self.notices: list[str] = []
        self.process: int | None = 1
        self.killed: list[int] = []
        monkeypatch.setattr(buffer_actor.os, "kill", lambda pid, number: self.killed.append(pid))
        args: Any = SimpleNamespace(buffer_hang_timeout_s=10, buffer_timeout_s=60)
        told = self.shown.append, self.notices.append
        self.watch = watch_buffer(self.ray, args, lambda: self.process, *told, now=lambda: self.time)

    def look_at(self, *times: float) -> None:
        for self.time in times:
            self.watch()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_buffer_that_answers_is_shown_and_left_alone(world: World) -> None:
    world.look_at(0, 100, 200)
    assert (len(world.shown), world.killed, world.notices) == (3, [], [])


def test_one_that_is_silent_for_too_long_is_ended_and_then_has_time_to_start(world: World) -> None:
    world.look_at(0)
    world.ray.answer = None
    world.look_at(1, 11)
    assert world.killed == []
    world.look_at(11.5)
    assert world.killed == [1]
    assert "did not answer for 10 s" in world.notices[0]
    world.process = None
    world.look_at(12, 72)
    assert world.ray.killed == []
    world.look_at(72.5)
    assert world.ray.killed == [False], "it is to be started again"


def test_one_that_hangs_soon_after_a_death_that_nobody_looked_at_is_not_taken_for_one_that_starts(world: World) -> None:
    world.look_at(0)
    world.ray.answer, world.process = None, 2
    world.look_at(5, 15.5)
    assert world.killed == [2]


def test_one_whose_change_never_ends_is_ended(world: World) -> None:
    world.ray.answer = {"busy_s": 10.5, "pid": 1}
    world.look_at(0)
    assert world.killed == [1]
    assert "one change for 10 s" in world.notices[0]


def test_a_death_that_ray_has_seen_to_is_told_when_the_next_one_answers(world: World) -> None:
    world.look_at(0)
    world.ray.answer, world.process = Dead(), None
    world.look_at(1)
    world.ray.answer = None
    world.look_at(2, 40)
    world.ray.answer = {"busy_s": 0.0, "pid": 7}
    world.look_at(41)
    assert (world.ray.killed, world.killed) == ([], [])
    assert world.notices == ["the Buffer died and was replaced (process 7)"]
