"""A failure is told with the role and the cause, not with Ray's wrapping."""

from __future__ import annotations

from ray.exceptions import ActorDiedError, RayTaskError

from buffer_rl.cluster.actor_group import name_failure, root_failure
from buffer_rl.errors import BufferRLError, PluginError, RolloutError, WorkerError


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


def test_the_root_of_several_failures_is_a_named_error_then_a_death_then_the_first() -> None:
    lost = RuntimeError("connection closed by peer")
    named: BaseException = task_error(BufferRLError("x"))
    died = ActorDiedError()
    assert root_failure({"a": lost, "b": died, "c": named}) == ("c", named)
    assert root_failure({"a": lost, "b": died}) == ("b", died)
    assert root_failure({"a": lost, "b": RuntimeError("other")}) == ("a", lost)
