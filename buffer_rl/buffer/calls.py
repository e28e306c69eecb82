"""Which methods of the Buffer are operations, and how a repeated call is recognised.

Ray may execute a call twice when a connection breaks between the call and its answer. Each mutation carries ``(caller,
sequence)``; a retry finds the stored answer and changes nothing. Each call also carries the smallest number for which
its caller still waits: older answers are dropped, so that the log does not grow with the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from buffer_rl.errors import BufferRLError, BufferStateError

if TYPE_CHECKING:
    from buffer_rl.cluster.calling import Answers

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
U = TypeVar("U")


def mutates(operation: F) -> F:
    """Marks an operation that changes the state: executed once per ``(caller, sequence)``."""
    operation.__dict__["changes_state"] = True
    return operation


def reads(operation: F) -> F:
    """Marks an operation that may be repeated: it changes nothing, or a repeat gives the same answer."""
    operation.__dict__["changes_state"] = False
    return operation


def changes_state(operation: object) -> bool | None:
    """The mark of a method; None for one that is no operation."""
    return getattr(operation, "changes_state", None)


class NumberedCall(NamedTuple):
    """A call as it is sent. sequence, open_from: see ``OpenCalls``; -1 of a call that reads. args: by position."""

    sequence: int
    open_from: int
    method: str
    args: Sequence[Any]


Sending = tuple["Answers", Callable[[], Any], NumberedCall | None]
"""What waits for the answer of a call, what sends it, and the call, if it may travel with others."""


class OpenCalls:
    """A caller's side: numbers its calls, and knows which of them wait for an answer. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()

    @contextmanager
    def numbered(self) -> Iterator[tuple[int, int]]:
        """``(sequence, open_from)`` of a call that is made, and if need be repeated, in the block. ``open_from``: no
        call with a smaller number will be repeated."""
        with self._lock:
            sequence, self._next = self._next, self._next + 1
            self._open.add(sequence)
            open_from = min(self._open)
        try:
            yield sequence, open_from
        finally:
            with self._lock:
                self._open.remove(sequence)


class StartedCall(Generic[T]):
    """A call under way, whose answer one thread waits for later: with ``result``, or with ``drain``, one of which must
    be called.

    sending: sends the call at once, and again if its answer is lost. It is closed when the answer is no longer needed.
    """

    def __init__(self, method: str, sending: AbstractContextManager[Sending]) -> None:
        self._method = method
        self._decode: Callable[[Any], Any] = lambda answer: answer
        with ExitStack() as stack:
            self._answers, self._send, _ = stack.enter_context(sending)
            self._sent = [self._send()]
            self._open: ExitStack | None = stack.pop_all()

    def then(self, decode: Callable[[T], U]) -> StartedCall[U]:
        """The same call, whose result ``decode`` makes of its answer."""
        self._decode = decode
        return cast("StartedCall[U]", self)

    def result(self) -> T:
        """The answer, waited for from now on as long as for any call; once. Raises what ``Answers`` names."""
        return cast("T", self._decode(answer_of(self._answer())))

    def drain(self) -> None:
        """Wait until the call is over, if ``result`` was not called; the answer or error is ignored."""
        if self._open is not None:
            with suppress(BufferRLError):
                self._answer()

    def _answer(self) -> Any:
        sending, self._open = self._open, None
        assert sending is not None, "one answer"
        with sending:
            return self._answers.wait(self._method, lambda: self._sent.pop() if self._sent else self._send())


def answer_of(answers: Sequence[Any]) -> Any:
    """The answer to a message of one call. Raises the error that it is."""
    (answer,) = answers
    if isinstance(answer, BufferRLError):
        raise answer
    return answer


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
