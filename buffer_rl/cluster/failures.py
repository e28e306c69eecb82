"""What went wrong in an actor, said with the actor's role and the cause instead of Ray's wrapping."""

from __future__ import annotations

import ray

from buffer_rl.errors import BufferRLError, WorkerError


def name_failure(role: str, error: BaseException) -> BufferRLError:
    """The error to raise for ``error``, which a call to ``role`` ended with.

    An error of ``buffer_rl.errors`` keeps its class; anything else becomes a WorkerError that names the role, the
    original exception and the end of its traceback.
    """
    cause = getattr(error, "cause", None) if isinstance(error, ray.exceptions.RayTaskError) else error
    if isinstance(cause, BufferRLError):
        cause.where = cause.where or role
        return cause
    if isinstance(error, ray.exceptions.RayTaskError):
        return WorkerError(f"{type(cause).__name__}: {cause}", where=role, hint=_traceback_tail(error))
    if isinstance(error, ray.exceptions.RayActorError):
        return WorkerError(f"the process died: {_first_lines(str(error))}", where=role)
    return WorkerError(f"{type(error).__name__}: {error}", where=role)


def _traceback_tail(error: ray.exceptions.RayTaskError, lines: int = 12) -> str:
    tail = str(error.traceback_str).strip().splitlines()[-lines:]
    return "the end of its traceback:\n    " + "\n    ".join(tail)


def _first_lines(text: str, lines: int = 6) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines()[:lines])
