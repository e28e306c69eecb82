"""What a failed call of an actor is told as."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from buffer_rl.cluster.calling import Answers
from buffer_rl.errors import ConfigError, DataError, DeadlineError, WorkerDiedError, WorkerError

TRACEBACK = """\x1b[36mray::BufferActor.__init__()\x1b[39m (pid=1)
  File "actor.py", line 61, in __init__
    self._ledger = Ledger(place.path)
                   ^^^^^^^^^^^^^^^^^^
buffer_rl.errors.ConfigError: """


def test_an_actor_whose_constructor_failed_is_told_by_the_constructors_error_alone() -> None:
    cause = ConfigError("the ledger cannot be opened: disk is full", where="ledger.sqlite", hint="free space")
    error = ActorDiedError(RayTaskError("__init__", f"{TRACEBACK}{cause}", cause, actor_id="0" * 32))
    named = Answers(who="the Buffer", role="buffer", timeout_s=1.0, flag="--buffer-timeout-s").named("release", error)
    assert isinstance(named, WorkerDiedError)
    assert str(named) == (
        "buffer.release: the process of the Buffer could not be set up: buffer_rl.errors.ConfigError: "
        "ledger.sqlite: the ledger cannot be opened: disk is full\n  hint: free space"
    )


class Source:
    """A class whose objects are elsewhere."""

    def take(self, number: int) -> str: ...


class Handle:
    """What Ray gives for an actor: ``take`` has ``outcomes``, one after another."""

    def __init__(self, *outcomes: str | Exception) -> None:
        self.outcomes = list(outcomes)
        self.asked: list[tuple[int, ...]] = []

    @property
    def take(self) -> Any:
        return self

    def remote(self, *args: int) -> Any:
        self.asked.append(args)
        answer: Future[str] = Future()
        outcome = self.outcomes.pop(0)
        answer.set_exception(outcome) if isinstance(outcome, Exception) else answer.set_result(outcome)
        return SimpleNamespace(future=lambda: answer)


def answers(timeout_s: float = 60.0, **more: str) -> Answers:
    return Answers(who="the source", role="source", timeout_s=timeout_s, flag="--source-timeout-s", **more)


def test_a_method_is_called_on_the_actor_by_its_name_and_again_while_the_actor_is_restarted() -> None:
    handle = Handle(ActorUnavailableError("it is restarted", b"0" * 16), "seven")
    assert asyncio.run(answers().acall(handle, Source.take, 7)) == "seven"
    assert handle.asked == [(7,), (7,)]


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (
            RayTaskError("take", "", TimeoutError("3 s"), actor_id="0" * 32),
            WorkerError,
            "source.take: TimeoutError: 3 s",
        ),
        (TimeoutError(), DeadlineError, "source: the source did not answer take within 60 s"),
        (RayTaskError("take", "", DataError("empty"), actor_id="0" * 32), DataError, "source.take: empty"),
    ],
    ids=["a deadline of the actor", "of the call", "of the project"],
)
def test_a_failed_call_is_named_and_not_repeated(raised: Exception, error: type[Exception], message: str) -> None:
    handle = Handle(raised.as_instanceof_cause() if isinstance(raised, RayTaskError) else raised)
    with pytest.raises(error) as caught:
        asyncio.run(answers().acall(handle, Source.take, 7))
    assert type(caught.value) is error
    assert str(caught.value).startswith(message)
    assert len(handle.asked) == 1


def test_a_death_for_good_is_a_failure_of_a_worker_for_an_actor_whose_death_ends_the_run() -> None:
    named = answers(death_hint="see its log").named("take", ActorDiedError())
    assert (type(named), named.where, named.hint) == (WorkerError, "source.take", "see its log")
    assert type(answers().named("take", ActorDiedError())) is WorkerDiedError
