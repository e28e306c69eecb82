"""Calls across processes: a deadline for each, and errors that name who failed.

``Call`` is a call of members of a group (see ``ActorGroup``); ``Answers`` makes calls of one actor, and repeats those
that are lost: Ray answers with ActorUnavailableError while an actor is restarted, also for calls that it had begun. A
repeat that must not execute twice has a number, by which the actor knows it (see ``buffer_rl.buffer.calls``).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import ray

from buffer_rl.cluster.dispatch import Collect, Later, Ts, first_answer
from buffer_rl.errors import BufferRLError, DeadlineError, TrainError, WorkerDiedError, WorkerError, WorkerHungError
from buffer_rl.observe.pulse import Waits, waiting

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

PATIENCE_S = 1.0
"""How long a process that may be dead is asked; Ray knows of a death by the time a call has failed with it."""
RETRY_S = 0.2
"""Pause before a call is made again."""


def blocking(operation: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[S, P], T]:
    """The synchronous form of an asynchronous method. It may be called in any thread, also in that of an event loop:
    it runs in a thread of its own, on an event loop of its own, with the context variables of the caller."""

    @functools.wraps(operation)
    def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(copy_context().run, asyncio.run, operation(self, *args, **kwargs)).result()

    return method


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call(Later):
    """A call under way. members: names of those that work on it, one for each of ``futures``. hung: as that of the
    group. timeout_s: the longest wait for it, if ``wait`` gets no other. refs: Ray's references to what ``futures``
    are; a call that has them may be sent to another process, which waits for it there."""

    role: str
    method: str
    members: Sequence[str]
    futures: Sequence[Future[Any]]
    collect: Collect = first_answer
    hung: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0
    refs: Sequence[Any] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        sent = {name: getattr(self, name) for name in ("role", "method", "members", "collect", "timeout_s", "refs")}
        return _received, (sent,)

    def ended(self) -> bool:
        """Whether all members answered, or one failed."""
        done = [future.done() for future in self.futures]
        return all(done) or any(d and f.exception() is not None for d, f in zip(done, self.futures, strict=True))

    def result(self) -> Any:
        """The members' answers as one, once the call has ended. Raises the error of the member that failed first of
        all, named (see ``root_failure``)."""
        if failures := failures_of(self.members, self.method, self.futures):  # the others may still be at work
            role, error = root_failure(failures)
            raise name_failure(role, error, self.hung.get(role.removesuffix(f".{self.method}"), "")) from error
        return self.collect(self.role, [future.result() for future in self.futures])

    def wait(self, timeout_s: float | None = None) -> Any:
        """``result``, once the call has ended. Raises DeadlineError after ``timeout_s``."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        wait(self.futures, timeout=limit, return_when=FIRST_EXCEPTION)
        if not self.ended():
            raise DeadlineError(f"no answer within {limit:g} s", where=f"{self.role}.{self.method}")
        return self.result()


def _received(sent: dict[str, Any]) -> Call:
    return Call(**sent, futures=[ref.future() for ref in sent["refs"]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Calls an actor, ``who`` in messages, and waits for its answers.

    death_hint: of an actor whose death for good is a WorkerError, after which the run is not started again.

    Raises DeadlineError where none comes within ``timeout_s``, which the option ``flag`` sets; the actor's own error
    where it raised one of ``buffer_rl.errors``; WorkerDiedError where it is gone for good; else a WorkerError that says
    that it failed.
    """

    who: str
    role: str
    timeout_s: float
    flag: str
    death_hint: str = ""

    def call(self, actor: Any, method: Callable[[Any, *Ts], T], *args: *Ts) -> T:
        """The answer of a method of the actor's class. Called again if it is lost, so a repeat must do no harm."""
        return cast("T", self.wait(method.__name__, partial(getattr(actor, method.__name__).remote, *args)))

    async def acall(self, actor: Any, method: Callable[[Any, *Ts], T], *args: *Ts) -> T:
        """``call`` for an event loop."""
        return cast("T", await self.until(method.__name__, partial(getattr(actor, method.__name__).remote, *args)))

    @waiting(Waits.DEADLINE)
    def wait(self, method: str, submit: Callable[[], Any]) -> Any:
        """The answer to the call that ``submit`` makes, once it is there."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return ray.get(submit(), timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayError as error:
                self._raise_unless_restarted(method, error, deadline)
            time.sleep(RETRY_S)

    async def until(self, method: str, submit: Callable[[], Any]) -> Any:
        """``wait`` for an event loop."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                future = asyncio.wrap_future(submit().future())
                return await asyncio.wait_for(future, max(0.0, deadline - time.monotonic()))
            except (TimeoutError, ray.exceptions.RayError) as error:
                self._raise_unless_restarted(method, error, deadline)
            await asyncio.sleep(RETRY_S)

    def _raise_unless_restarted(self, method: str, error: Exception, deadline: float) -> None:
        """Return if the actor is being restarted and there is time to call again."""
        restarts = isinstance(error, ray.exceptions.ActorUnavailableError)
        if restarts and time.monotonic() + RETRY_S < deadline:
            return
        raised = isinstance(error, ray.exceptions.RayTaskError)  # by the actor, perhaps a TimeoutError
        is_late = restarts or (isinstance(error, TimeoutError) and not raised)
        raise (self._late(method) if is_late else self.named(method, error)) from error

    def named(self, method: str, error: Any) -> BufferRLError:
        """The error of a failed call, as one of this project."""
        where = f"{self.role}.{method}"
        if not isinstance(error, ray.exceptions.RayActorError):
            return name_failure(where, error)
        if self.death_hint:
            what = f"its process died, and is not replaced again: {error}"
            return WorkerError(what, where=where, hint=self.death_hint)
        how = f"could not be set up: {_last_error(error)}" if error.actor_init_failed else f"died: {error}"
        return WorkerDiedError(f"the process of {self.who} {how}", where=where)

    def _late(self, method: str) -> DeadlineError:
        what = f"{self.who} did not answer {method} within {self.timeout_s:g} s"
        return DeadlineError(what, where=self.role, hint=f"raise {self.flag} if it is only slow")


def _last_error(error: BaseException) -> str:
    """The error of a constructor, without its traceback: Ray keeps both as text alone."""
    lines = str(error).splitlines()
    code = [number for number, line in enumerate(lines) if line.startswith("    ")]
    return "\n".join(lines[code[-1] + 1 :] if code else lines)


def name_failure(role: str, error: BaseException, hung: str = "") -> BufferRLError:
    """The error to raise for ``error``, which a call to ``role`` ended with. hung: what to say if its process was ended
    because it hung.

    An error of ``buffer_rl.errors`` keeps its class; anything else becomes a WorkerError that names the role, the
    original exception and the end of its traceback, or a WorkerDiedError.
    """
    cause = _cause(error)
    if isinstance(cause, BufferRLError):
        cause.where = cause.where or role
        return cause
    if isinstance(cause, (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)):
        what = "the object store is full, and so is the disk that it spills to"
        expected = "room for the payloads of the rollouts that are not released yet"
        hint = "raise --object-store-gb (or the store of the cluster's nodes), or free space on that disk"
        see = "docs/troubleshooting.md#the-object-store-is-full"
        return WorkerError(what, where=role, expected=expected, hint=hint, see=see)
    if isinstance(error, ray.exceptions.RayTaskError):
        hint = f"the end of its traceback:{_tail(str(error))}"
        return WorkerError(f"{type(cause).__name__}: {cause}", where=role, hint=hint)
    if isinstance(error, ray.exceptions.RayActorError):
        if error.actor_init_failed:  # Ray keeps the constructor's error as text alone, and it stands at the end
            return WorkerError(f"the process could not be set up: {_tail(str(error))}", where=role)
        if hung:
            hint, see = "the stack of all its threads is in its log", "docs/troubleshooting.md#the-run-hangs"
            return WorkerHungError(hung, where=role, hint=hint, see=see)
        see, lines = "docs/troubleshooting.md#a-process-died", str(error).strip().splitlines()[:6]
        return WorkerDiedError(f"the process died: {' / '.join(map(str.strip, lines))}", where=role, see=see)
    return WorkerError(f"{type(error).__name__}: {error}", where=role)


def failures_of(members: Sequence[str], method: str, futures: Sequence[Future[Any]]) -> dict[str, BaseException]:
    """The errors of those members' calls that have failed by now, by member.

    Where one may be that of a lost connection, the members that have not answered yet get ``PATIENCE_S``: a peer that
    died is known to have died a little later than those that lost it say so."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        calls = zip(members, futures, strict=True)
        errors = {name: error for name, future in calls if future.done() and (error := future.exception())}
        pending = [future for future in futures if not future.done()]
        left = deadline - time.monotonic()
        if not pending or left <= 0 or not errors or not all(map(_may_follow_a_death, errors.values())):
            return {f"{name}.{method}": error for name, error in errors.items()}
        wait(pending, timeout=left, return_when=FIRST_EXCEPTION)


def _may_follow_a_death(error: BaseException) -> bool:
    cause = _cause(error)
    known = isinstance(error, ray.exceptions.RayActorError) or isinstance(cause, BufferRLError)
    return not known or isinstance(cause, TrainError)


def root_failure(errors: Mapping[str, BaseException]) -> tuple[str, BaseException]:
    """Of the errors that several members of a group ended with, by role, the one to raise.

    When one rank fails, the others lose their connection to it, and may say so first, as a trainer's error too. So a
    process that died comes first, then an error of ``buffer_rl.errors``, a trainer's last, then everything else; equal
    ones in order.
    """
    return min(errors.items(), key=lambda item: _distance_from_root(item[1]))


def _distance_from_root(error: BaseException) -> int:
    if isinstance(error, ray.exceptions.RayActorError):
        return 0
    cause = _cause(error)
    return 2 if isinstance(cause, TrainError) else 1 if isinstance(cause, BufferRLError) else 3


def _cause(error: BaseException) -> Any:
    return getattr(error, "cause", None) if isinstance(error, ray.exceptions.RayTaskError) else error


def _tail(text: str) -> str:
    return "".join(f"\n    {line}" for line in text.strip().splitlines()[-12:])


class JoinedCalls(Generic[T]):
    """Calls of one event loop that travel together: those that are made while a message is under way go in the next
    one, so that a call that comes alone waits for nothing. An actor's call costs more than what most of them carry.

    send: sends the calls as one message. It returns for each its answer, or its error, and raises where the message
    failed as a whole. together: how many of the calls that wait the next message takes, the oldest first.
    """

    def __init__(
        self,
        send: Callable[[list[T]], Coroutine[Any, Any, Sequence[Any]]],
        together: Callable[[Sequence[T]], int] = len,
    ) -> None:
        self._send, self._together = send, together
        self._waiting: list[tuple[T, asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def make(self, call: T) -> Any:
        """The answer to ``call``. A caller that is cancelled leaves the others alone."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((call, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        return await answer

    async def _send_all(self) -> None:
        batch: list[tuple[T, asyncio.Future[Any]]] = []
        try:
            while waiting := [entry for entry in self._waiting if not entry[1].cancelled()]:
                count = self._together([call for call, _ in waiting])
                batch, self._waiting = waiting[:count], waiting[count:]
                try:
                    results = await self._send([call for call, _ in batch])
                except Exception as error:  # fault boundary: the answer of each call
                    results = [error] * len(batch)
                for (_, answer), result in zip(batch, results, strict=True):
                    if answer.cancelled():
                        continue
                    if isinstance(result, Exception):
                        answer.set_exception(result)
                    else:
                        answer.set_result(result)
        finally:  # the loop ends where calls are left
            self._sending = None
            for _, answer in [*batch, *self._waiting]:
                answer.cancel()
            self._waiting.clear()
