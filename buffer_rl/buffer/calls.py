"""Which methods of the Buffer are operations, and how a repeated call is recognised.

Ray may execute a call twice when a connection breaks between the call and its answer. Each mutation carries ``(caller,
sequence)``; a retry finds the stored answer and changes nothing. Each call also carries the smallest number for which
its caller still waits: older answers are dropped, so that the log does not grow with the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TypeVar

from buffer_rl.errors import BufferStateError

F = TypeVar("F", bound=Callable[..., Any])


class Kind(StrEnum):
    """What a call of an operation does to the Buffer's state."""

    MUTATES = "changes state"
    READS = "reads"


def mutates(operation: F) -> F:
    """Marks an operation that changes the state: executed once per ``(caller, sequence)``."""
    operation.__dict__["kind"] = Kind.MUTATES
    return operation


def reads(operation: F) -> F:
    """Marks an operation that may be repeated: it changes nothing, or a repeat gives the same answer."""
    operation.__dict__["kind"] = Kind.READS
    return operation


def kind_of(operation: object) -> Kind | None:
    """The mark of a method; None for one that is no operation."""
    return getattr(operation, "kind", None)


class OpenCalls:
    """A caller's side: numbers its calls, and knows which of them wait for an answer. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()

    def begin(self) -> tuple[int, int]:
        """``(sequence, open_from)`` of a call that is made, and if need be repeated, until ``end``. ``open_from``: no
        call with a smaller number will be repeated."""
        with self._lock:
            sequence, self._next = self._next, self._next + 1
            self._open.add(sequence)
            return sequence, min(self._open)

    def end(self, sequence: int) -> None:
        """The call was answered, or is given up."""
        with self._lock:
            self._open.remove(sequence)

    @contextmanager
    def numbered(self) -> Iterator[tuple[int, int]]:
        """``begin``, and ``end`` after the block."""
        sequence, open_from = self.begin()
        try:
            yield sequence, open_from
        finally:
            self.end(sequence)


class CallLog:
    """The side that answers: executes each ``(caller, sequence)`` once. A call that raised changed nothing, so its
    repeat is executed."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[int, Any]] = {}
        self._open_from: dict[str, int] = {}

    def once(
        self, caller: str, sequence: int, open_from: int, execute: Callable[..., Any], args: Sequence[Any] = ()
    ) -> Any:
        """``execute(*args)``, or the answer that it gave before. Answers of ``caller`` before ``open_from`` are
        dropped.

        Raises BufferStateError for a call that its caller has given up.
        """
        answers = self._answers.setdefault(caller, {})
        oldest = self._open_from[caller] = max(open_from, self._open_from.get(caller, 0))
        for done in [number for number in answers if number < oldest]:
            del answers[done]
        if sequence < oldest:
            raise BufferStateError(f"{caller} no longer waits for its call {sequence}; nothing was changed")
        if sequence not in answers:
            answers[sequence] = execute(*args)
        return answers[sequence]
