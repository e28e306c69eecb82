"""Replacements that lack weights while a rollout waits for an engine."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from buffer_rl.cluster.actor_group import Call
from buffer_rl.driver.local_roles import EngineFeed
from buffer_rl.errors import DeadlineError, WorkerDiedError


class Fleet:
    """A fleet of which only the version is asked that its engines lack."""

    def __init__(self, version: int | None) -> None:
        self._version = version

    def starved_version(self) -> int | None:
        return self._version


def feed(version: int | None, *, busy: bool = False, ends: bool = True) -> tuple[list[int], list[str]]:
    """What is published and said."""
    published: list[int] = []
    notices: list[str] = []

    def publish(wanted: int) -> Call:
        published.append(wanted)
        future: Future[Any] = Future()
        if ends:
            future.set_result({})
        return Call(role="publish", method="publish", members=["publish"], futures=[future])

    fleet: Any = Fleet(version)
    EngineFeed(fleet, publish, 0.01, notices.append, trainer_is_busy=busy)()
    return published, notices


def test_the_version_is_published_again_where_every_engine_lacks_it_and_nothing_is_done_elsewhere() -> None:
    published, notices = feed(0)
    assert published == [0]
    assert notices == ["version 0 is published again, as every engine that had it is gone"]
    assert feed(None) == ([], [])
    assert feed(None, busy=True) == ([], [])


def test_the_wait_for_it_has_a_deadline() -> None:
    with pytest.raises(DeadlineError, match="publish"):
        feed(3, ends=False)


def test_a_trainer_that_works_during_rollouts_makes_it_a_death_that_starts_the_processes_again() -> None:
    with pytest.raises(WorkerDiedError, match="no engine has the weights of version 3"):
        feed(3, busy=True)
