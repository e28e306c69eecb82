"""A failure is told with the role and the cause, not with Ray's wrapping."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from buffer_rl.cluster.calling import Call, failures_of, name_failure, root_failure
from buffer_rl.errors import (
    BufferRLError,
    PayloadLostError,
    PluginError,
    RolloutError,
    TrainError,
    WorkerError,
    WorkerHungError,
)


def raw_error(cause: Exception) -> RayTaskError:
    trace = "\n".join(f"line {number}" for number in range(40))
    return RayTaskError("run", f"{trace}\n{type(cause).__name__}: {cause}", cause, actor_id="0" * 32)


def task_error(cause: Exception) -> RayTaskError:
    """What a future of Ray holds: an error that is of the cause's class too."""
    error: RayTaskError = raw_error(cause).as_instanceof_cause()
    return error


def test_an_error_of_this_library_keeps_its_class_and_its_place() -> None:
    named = name_failure("rollout.run", task_error(RolloutError("no group", where="train_3")))
    assert (type(named), named.where) == (RolloutError, "train_3")
    assert name_failure("rollout.run", RolloutError("no group")).where == "rollout.run"


def test_an_unexpected_error_becomes_one_that_shows_the_end_of_its_traceback() -> None:
    named = name_failure("train 1.train", task_error(ZeroDivisionError("by zero")))
    assert isinstance(named, WorkerError)
    assert str(named).startswith("train 1.train: ZeroDivisionError: by zero")
    assert "line 39" in named.hint
    assert "line 20" not in named.hint


def test_a_worker_whose_constructor_failed_shows_the_constructors_error() -> None:
    error = ActorDiedError(raw_error(PluginError("my_reward has no attribute 'scor'", hint="did you mean score?")))
    named = name_failure("rollout.ready", error)
    assert "could not be set up" in named.what
    assert "my_reward has no attribute 'scor'" in named.what
    assert "did you mean score?" in named.what


def test_a_dead_process_is_said_to_have_died() -> None:
    assert name_failure("buffer", ActorDiedError()).what.startswith("the process died")


def test_a_process_that_was_ended_because_it_hung_is_said_to_have_hung() -> None:
    named = name_failure("train 1.train", ActorDiedError(), "hung: no answer for 61 s in train")
    assert isinstance(named, WorkerHungError)
    assert str(named).startswith("train 1.train: hung: no answer for 61 s in train")
    failed = name_failure("train 0.train", task_error(TrainError("connection closed")), "hung")
    assert type(failed) is TrainError


def test_the_call_of_a_member_that_was_ended_because_it_hung_says_so() -> None:
    futures = [Future[Any](), Future[Any]()]
    futures[0].set_exception(RuntimeError("connection closed by peer"))
    futures[1].set_exception(ActorDiedError())
    members = ["train 0", "train 1"]
    call = Call(role="train", method="train", members=members, futures=futures, hung={"train 1": "hung: no answer"})
    with pytest.raises(WorkerHungError, match=r"train 1\.train: hung: no answer"):
        call.result()


def test_the_root_of_several_failures_is_a_death_then_a_named_error_then_a_trainers_then_the_first() -> None:
    lost, peer = RuntimeError("connection closed by peer"), task_error(TrainError("another rank cannot go on"))
    named: BaseException = task_error(BufferRLError("x"))
    died = ActorDiedError()
    assert root_failure({"a": lost, "b": named, "c": died}) == ("c", died)
    assert root_failure({"a": lost, "b": peer, "c": named}) == ("c", named)
    assert root_failure({"a": lost, "b": peer}) == ("b", peer)
    assert root_failure({"a": lost, "b": RuntimeError("other")}) == ("a", lost)


class Looked(Future[Any]):
    """Sets ``seen`` when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def done(self) -> bool:
        self.seen.set()
        return super().done()


@pytest.mark.parametrize("first", [RuntimeError("connection closed by peer"), TrainError("it raised RuntimeError")])
def test_a_death_that_is_known_after_the_errors_of_its_peers_is_among_the_failures(
    first: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer_rl.cluster.calling.PATIENCE_S", 60.0)
    futures, died = [Future[Any](), Looked(), Looked()], ActorDiedError()
    futures[0].set_exception(first)

    def end() -> None:
        futures[1].seen.wait(60)  # type: ignore[attr-defined]
        futures[1].set_exception(first)
        futures[2].set_exception(died)

    thread = threading.Thread(target=end)
    thread.start()
    found = failures_of(["train 0", "train 1", "train 2"], "train", futures)
    thread.join()
    assert found == {"train 0.train": first, "train 1.train": first, "train 2.train": died}
    assert root_failure(found) == ("train 2.train", died)


@pytest.mark.parametrize("first", [ActorDiedError(), task_error(PayloadLostError("gone"))])
def test_what_no_death_can_be_behind_is_not_waited_for(first: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_rl.cluster.calling.PATIENCE_S", 1e9)
    futures = [Future[Any](), Future[Any]()]
    futures[1].set_exception(first)
    assert failures_of(["ref 0", "ref 1"], "stream", futures) == {"ref 1.stream": first}
