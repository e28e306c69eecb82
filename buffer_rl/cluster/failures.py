"""What went wrong in an actor, said with the actor's role and the cause instead of Ray's wrapping."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from buffer_rl.errors import BufferRLError, WorkerDiedError, WorkerError


def name_failure(role: str, error: BaseException) -> BufferRLError:
    """The error to raise for ``error``, which a call to ``role`` ended with.

    An error of ``buffer_rl.errors`` keeps its class; anything else becomes a WorkerError that names the role, the
    original exception and the end of its traceback, or a WorkerDiedError.
    """
    cause = getattr(error, "cause", None) if isinstance(error, ray.exceptions.RayTaskError) else error
    if isinstance(cause, BufferRLError):
        cause.where = cause.where or role
        return cause
    if isinstance(error, ray.exceptions.RayTaskError):
        return WorkerError(
            f"{type(cause).__name__}: {cause}", where=role, hint=f"the end of its traceback:{_tail(str(error))}"
        )
    if isinstance(error, ray.exceptions.RayActorError):
        if error.actor_init_failed:  # Ray keeps the constructor's error as text alone, and it stands at the end
            return WorkerError(f"the process could not be set up: {_tail(str(error))}", where=role)
        return WorkerDiedError(f"the process died: {_first_lines(str(error))}", where=role)
    return WorkerError(f"{type(error).__name__}: {error}", where=role)


def root_failure(errors: Mapping[str, BaseException]) -> tuple[str, BaseException]:
    """Of the errors that several members of a group ended with, by role, the one to raise.

    When one rank fails, the others lose their connection to it, and may say so first. So an error of
    ``buffer_rl.errors`` comes before a process that died, and that before everything else; equals in given order.
    """
    return min(errors.items(), key=lambda item: _distance_from_root(item[1]))


def _distance_from_root(error: BaseException) -> int:
    cause = getattr(error, "cause", None) if isinstance(error, ray.exceptions.RayTaskError) else error
    if isinstance(cause, BufferRLError):
        return 0
    return 1 if isinstance(error, ray.exceptions.RayActorError) else 2


def _tail(text: str, lines: int = 12) -> str:
    return "".join(f"\n    {line}" for line in text.strip().splitlines()[-lines:])


def _first_lines(text: str, lines: int = 6) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines()[:lines])
