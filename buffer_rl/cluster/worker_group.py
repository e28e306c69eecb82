"""A group of Ray actors with one role: calls on every member or on the next one, their failures, their log files."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import Any

import ray

from buffer_rl.errors import BufferRLError, DeadlineError, TrainError, WorkerDiedError, WorkerError

PATIENCE_S = 1.0
"""How long a process that may be dead is asked; Ray knows of a death by the time a call has failed with it."""

Combine = Callable[[str, list[Any]], Any]
"""Makes one answer of the members' answers: ``(method, answers in rank order) -> answer``."""


def first_answer(method: str, answers: list[Any]) -> Any:
    """The first member's answer: for methods that all members answer alike, and for single members."""
    return answers[0]


class WorkerGroup:
    """Actors that do the same work on shares of it.

    one_at_a_time: a call goes to the next member, in turn, instead of to all of them.
    """

    def __init__(
        self, role: str, actors: Sequence[Any], *, combine: Combine = first_answer, one_at_a_time: bool = False
    ) -> None:
        if not actors:
            raise ValueError(f"the worker group {role!r} has no members")
        self.role = role
        self.actors = list(actors)
        self.combine = combine
        self._turns = itertools.count() if one_at_a_time else None

    def start(self, method: str, *args: Any) -> list[Future[Any]]:
        """Call ``method`` on the members; one future each."""
        members = self.actors if self._turns is None else [self.actors[next(self._turns) % len(self.actors)]]
        return [getattr(actor, method).remote(*args).future() for actor in members]

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """``start`` and wait for all answers, combined. Raises DeadlineError, or a member's error, named."""
        futures = self.start(method, *args)
        _, late = wait(futures, timeout=timeout_s, return_when=FIRST_EXCEPTION)
        if failures := failures_of(self.role, method, futures):
            role, error = root_failure(failures)
            raise name_failure(role, error) from error
        if late:
            raise DeadlineError(f"no answer within {timeout_s:g} s", where=f"{self.role}.{method}")
        return self.combine(method, [future.result() for future in futures])

    def stop(self, close_method: str = "", timeout_s: float = 0.0) -> None:
        """End the members' processes. Never raises: it is called while another error is on its way.

        close_method: a method that every member is asked to execute first, within ``timeout_s`` for all of them.
        """
        if close_method:
            asked: list[Future[Any]] = []
            for actor in self.actors:
                with contextlib.suppress(Exception):  # fault boundary: a member, or Ray itself, may be gone
                    asked.append(getattr(actor, close_method).remote().future())
            wait(asked, timeout=timeout_s)
        for actor in self.actors:
            with contextlib.suppress(Exception):  # as above
                ray.kill(actor, no_restart=True)


def is_dead(actor: Any, method: str) -> bool:
    """Whether an actor's process is gone. One that does not answer ``method`` at once is at work."""
    asked = getattr(actor, method).remote()
    try:
        ray.get(asked, timeout=PATIENCE_S)
    except ray.exceptions.RayActorError:
        return True
    except Exception:  # fault boundary: whatever it answers, it is there
        return False
    return False


def name_failure(role: str, error: BaseException) -> BufferRLError:
    """The error to raise for ``error``, which a call to ``role`` ended with.

    An error of ``buffer_rl.errors`` keeps its class; anything else becomes a WorkerError that names the role, the
    original exception and the end of its traceback, or a WorkerDiedError.
    """
    cause = _cause(error)
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


def failures_of(role: str, method: str, futures: Sequence[Future[Any]]) -> dict[str, BaseException]:
    """The errors of those members' calls that have failed by now, by member.

    Where one may be that of a lost connection, the members that have not answered yet get ``PATIENCE_S``: a peer that
    died is known to have died a little later than those that lost it say so."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        errors = {rank: error for rank, future in enumerate(futures) if future.done() and (error := future.exception())}
        pending = [future for future in futures if not future.done()]
        left = deadline - time.monotonic()
        if not pending or left <= 0 or not errors or not all(map(_may_follow_a_death, errors.values())):
            many = len(futures) > 1
            return {f"{role} {rank}.{method}" if many else f"{role}.{method}": errors[rank] for rank in errors}
        wait(pending, timeout=left, return_when=FIRST_EXCEPTION)


def _may_follow_a_death(error: BaseException) -> bool:
    cause = _cause(error)
    known = isinstance(error, ray.exceptions.RayActorError) or isinstance(cause, BufferRLError)
    return not known or isinstance(cause, TrainError)


def root_failure(errors: Mapping[str, BaseException]) -> tuple[str, BaseException]:
    """Of the errors that several members of a group ended with, by role, the one to raise.

    When one rank fails, the others lose their connection to it, and may say so first, as a trainer's error too. So a
    process that died comes first, then an error of ``buffer_rl.errors``, then everything else; equal ones in order.
    """
    return min(errors.items(), key=lambda item: _distance_from_root(item[1]))


def _distance_from_root(error: BaseException) -> int:
    if isinstance(error, ray.exceptions.RayActorError):
        return 0
    return 1 if isinstance(_cause(error), BufferRLError) else 2


def _cause(error: BaseException) -> Any:
    return getattr(error, "cause", None) if isinstance(error, ray.exceptions.RayTaskError) else error


def _tail(text: str, lines: int = 12) -> str:
    return "".join(f"\n    {line}" for line in text.strip().splitlines()[-lines:])


def _first_lines(text: str, lines: int = 6) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines()[:lines])


def redirect_output(path: str) -> None:
    """Send this process's standard output and error, and those of its children, to the end of ``path``."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Python's own streams may write to Ray's copies of the descriptors: point them at the file as well.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
