"""What a failed call of an actor is told as."""

from __future__ import annotations

from ray.exceptions import ActorDiedError, RayTaskError

from buffer_rl.cluster.calling import Answers
from buffer_rl.errors import ConfigError, WorkerDiedError

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
