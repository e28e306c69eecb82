"""Processes that Ray starts again: each is noticed, and too many of the reward model end the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from buffer_rl.cluster import hangs
from buffer_rl.cluster.hangs import ReplacementWatch
from buffer_rl.errors import WorkerDiedError
from buffer_rl.rollout.data_source import DataSourceActor
from buffer_rl.train.reward_model import watch_reward_model


class Actor:
    """Ray's handle of an actor. answer: its process, the error that a question ends with, or None while it is at work.
    asked: how often it was."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, 0
        self.pid = self.ready = self

    def remote(self) -> Actor:
        self.asked += 1
        return self


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(actor: Actor, timeout: float) -> Any:
        if isinstance(actor.answer, Exception):
            raise actor.answer
        return actor.answer

    def wait(actors: list[Actor], timeout: float) -> tuple[list[Actor], list[Actor]]:
        return ([], actors) if actors[0].answer is None else (actors, [])

    monkeypatch.setattr(hangs, "ray", SimpleNamespace(get=get, wait=wait, exceptions=ray.exceptions))


DOWN = ray.exceptions.ActorUnavailableError("it is started again", b"0" * 16)


def test_another_process_is_told_once_and_one_that_is_at_work_is_not_asked_again() -> None:
    actors, told = [Actor(1), Actor(2)], list[tuple[int, int]]()
    watch = ReplacementWatch(actors, DataSourceActor.ready, replaced=lambda *which: told.append(which))
    for answers in ((1, 2), (1, None), (1, None), (DOWN, 2), (7, 2), (7, 2)):
        for actor, answer in zip(actors, answers, strict=True):
            actor.answer = answer
        watch()
    assert told == [(0, 7)]
    assert [actor.asked for actor in actors] == [6, 4]


def test_a_process_that_was_replaced_just_before_the_end_is_told_too() -> None:
    actor, told = Actor(1), list[tuple[int, int]]()
    watch = ReplacementWatch([actor], DataSourceActor.ready, replaced=lambda *which: told.append(which))
    watch()
    actor.answer = 2
    watch.close()
    assert told == [(0, 2)]


def reward_model(actors: list[Actor], notices: list[str]) -> ReplacementWatch[int]:
    group: Any = SimpleNamespace(actors=actors, hung={"reward 1": "hung: no answer"}, name_of="reward {}".format)
    return watch_reward_model(group, 2, notices.append)


def test_deaths_of_the_reward_model_are_counted_over_its_processes_and_one_too_many_ends_the_run() -> None:
    actors, notices = [Actor(1), Actor(2)], list[str]()
    watch = reward_model(actors, notices)
    watch()
    actors[0].answer = 3
    watch()
    actors[1].answer = 4
    watch()
    assert notices == [
        "process 0 of the reward model died and was replaced (1 of 2; process 3)",
        "process 1 of the reward model hung and was replaced (2 of 2; process 4)",
    ]
    actors[0].answer = 5
    with pytest.raises(WorkerDiedError, match="process 0 of the reward model died; 3 deaths of the role in all"):
        watch()


def test_a_process_of_the_reward_model_that_is_not_started_again_ends_the_run() -> None:
    actors = [Actor(1)]
    watch = reward_model(actors, [])
    watch()
    actors[0].answer = ray.exceptions.ActorDiedError()
    with pytest.raises(WorkerDiedError, match="process 0 of the reward model died; 1 deaths of the role in all"):
        watch()
