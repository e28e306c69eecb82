"""A group of Ray actors with one role, addressed together (every member) or one at a time (the next member)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import ray

from buffer_rl.cluster.failures import name_failure, root_failure
from buffer_rl.errors import DeadlineError

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
        self._turns = itertools.cycle(self.actors) if one_at_a_time else None

    def start(self, method: str, *args: Any) -> list[Future[Any]]:
        """Call ``method`` on the members; one future each."""
        members = self.actors if self._turns is None else [next(self._turns)]
        return [getattr(actor, method).remote(*args).future() for actor in members]

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """``start`` and wait for all answers, combined. Raises DeadlineError, or a member's error, named."""
        futures = self.start(method, *args)
        _, late = wait(futures, timeout=timeout_s, return_when=FIRST_EXCEPTION)
        failures = {
            f"{self.role} {rank}.{method}": error
            for rank, future in enumerate(futures)
            if future.done() and (error := future.exception()) is not None
        }
        if failures:
            role, error = root_failure(failures)
            raise name_failure(role, error) from error
        if late:
            raise DeadlineError(f"no answer within {timeout_s:g} s", where=f"{self.role}.{method}")
        return self.combine(method, [future.result() for future in futures])

    def stop(self, farewell: str = "", timeout_s: float = 0.0) -> None:
        """End the members' processes. Never raises: it is called while another error is on its way.

        farewell: a method that every member is asked to execute first, within ``timeout_s`` for all of them.
        """
        if farewell:
            asked: list[Future[Any]] = []
            for actor in self.actors:
                with contextlib.suppress(Exception):  # fault boundary: a member, or Ray itself, may be gone
                    asked.append(getattr(actor, farewell).remote().future())
            wait(asked, timeout=timeout_s)
        for actor in self.actors:
            with contextlib.suppress(Exception):  # as above
                ray.kill(actor, no_restart=True)
