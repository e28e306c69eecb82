"""Calls on an actor: a deadline for each, a repeat where the actor was being restarted, errors that name it.

Ray answers with ActorUnavailableError while an actor is restarted, also for calls that it had begun. So a call is given
as a function that submits it, and submitted again until the deadline. The actor deduplicates by ``(caller, sequence)``,
so retries are idempotent (see ``buffer_rl.buffer.calls``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, TypeVarTuple, cast

import ray

from buffer_rl.errors import BufferRLError, DeadlineError, WorkerDiedError, WorkerError
from buffer_rl.observe.pulse import Waits, waiting

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

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
        name = method.__name__
        return cast("T", self.wait(name, partial(getattr(actor, name).remote, *args)))

    async def acall(self, actor: Any, method: Callable[[Any, *Ts], T], *args: *Ts) -> T:
        """``call`` for an event loop."""
        name = method.__name__
        return cast("T", await self.until(name, partial(getattr(actor, name).remote, *args)))

    def wait(self, method: str, submit: Callable[[], Any]) -> Any:
        """The answer to the call that ``submit`` makes, once it is there."""
        with waiting(Waits.DEADLINE):
            return self._wait(method, submit)

    def _wait(self, method: str, submit: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return ray.get(submit(), timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.GetTimeoutError as error:
                raise self._late(method) from error
            except ray.exceptions.ActorUnavailableError as error:
                if time.monotonic() + RETRY_S >= deadline:
                    raise self._late(method) from error
                time.sleep(RETRY_S)
            except ray.exceptions.RayError as error:
                raise self.named(method, error) from error

    async def until(self, method: str, submit: Callable[[], Any]) -> Any:
        """``wait`` for an event loop."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                future = asyncio.wrap_future(submit().future())
                return await asyncio.wait_for(future, max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                if isinstance(error, ray.exceptions.RayTaskError):  # one that the actor raised
                    raise self.named(method, error) from error
                raise self._late(method) from error
            except ray.exceptions.ActorUnavailableError as error:
                if time.monotonic() + RETRY_S >= deadline:
                    raise self._late(method) from error
                await asyncio.sleep(RETRY_S)
            except ray.exceptions.RayError as error:
                raise self.named(method, error) from error

    def named(self, method: str, error: Any) -> BufferRLError:
        """The error of a failed call, as one of this project."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, BufferRLError):
            return cause
        where = f"{self.role}.{method}"
        if isinstance(cause or error, (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)):
            return WorkerError(
                "the object store is full, and so is the disk that it spills to",
                where=where,
                expected="room for the payloads of the rollouts that are not released yet",
                hint="raise --object-store-gb (or the store of the cluster's nodes), or free space on that disk",
            )
        if isinstance(error, ray.exceptions.RayActorError):
            if self.death_hint:
                what = f"its process died, and is not replaced again: {error}"
                return WorkerError(what, where=where, hint=self.death_hint)
            if error.actor_init_failed:
                return WorkerDiedError(
                    f"the process of {self.who} could not be set up: {_last_error(error)}", where=where
                )
            return WorkerDiedError(f"the process of {self.who} died: {error}", where=where)
        return WorkerError(f"{type(cause or error).__name__}: {cause or error}", where=where)

    def _late(self, method: str) -> DeadlineError:
        return DeadlineError(
            f"{self.who} did not answer {method} within {self.timeout_s:g} s",
            where=self.role,
            hint=f"raise {self.flag} if it is only slow",
        )


def _last_error(error: BaseException) -> str:
    """The error of a constructor, without its traceback: Ray keeps both as text alone."""
    lines = str(error).splitlines()
    code = [number for number, line in enumerate(lines) if line.startswith("    ")]
    return "\n".join(lines[code[-1] + 1 :] if code else lines)


class JoinedCalls(Generic[T]):
    """Calls of one event loop that travel together: those that are made while a message is under way go in the next
    one, so that a call that comes alone waits for nothing. An actor's call costs more than what most of them carry.

    send: sends the calls as one message. It returns for each its answer, or its error, and raises where the message
    failed as a whole.
    """

    def __init__(self, send: Callable[[list[T]], Coroutine[Any, Any, list[Any]]]) -> None:
        self._send = send
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
            while batch := [entry for entry in self._waiting if not entry[1].cancelled()]:
                self._waiting.clear()
                try:
                    results = await self._send([call for call, _ in batch])
                except Exception as error:
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


class StartedCall(Generic[T]):
    """A call under way, whose answer one thread waits for later.

    submit: makes the call; at once, and again where Ray lost it. decode: makes the result of the answer.
    on_done: called once, when the answer is no longer needed: after ``result`` or ``drain``; one of them
    must be called.
    """

    def __init__(
        self,
        answers: Answers,
        method: str,
        submit: Callable[[], Any],
        *,
        decode: Callable[[Any], T],
        on_done: Callable[[], None],
    ) -> None:
        self._answers = answers
        self._method = method
        self._submit = submit
        self._decode = decode
        self._on_done: Callable[[], None] | None = on_done
        self._submitted: list[Any] = []
        try:
            self._submitted.append(submit())
        except BaseException:
            self._end()
            raise

    def result(self) -> T:
        """The answer, waited for from now on as long as for any call; once. Raises what ``Answers`` names."""
        return self._decode(self._answer())

    def drain(self) -> None:
        """Wait until the call is over, if ``result`` was not called; the answer or error is ignored."""
        if self._on_done is not None:
            with contextlib.suppress(BufferRLError):
                self._answer()

    def _answer(self) -> Any:
        try:
            return self._answers.wait(
                self._method, lambda: self._submitted.pop() if self._submitted else self._submit()
            )
        finally:
            self._end()

    def _end(self) -> None:
        if self._on_done is not None:
            self._on_done()
            self._on_done = None
