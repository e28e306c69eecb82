"""Calling plugins, and the one style of errors about them: kind, reference, origin; what is wrong; expected; names.

Code of a user may raise anything. All of it is called inside ``contained``, or ``awaited`` if it is asynchronous, and
so raises subclasses of Exception alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import errno
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from buffer_rl.errors import BufferRLError, EndedBySignal, PluginError, short_repr
from buffer_rl.kinds.kind import PluginKind
from buffer_rl.kinds.table import kind_named

_MOST_NAMES_SHOWN = 12
TAIL_LINES = 12
_CALLERS = frozenset(
    {
        *(__name__, "buffer_rl.rollout.user_functions", "buffer_rl.agents.play", "buffer_rl.agents.runner"),
        *("buffer_rl.agents.environment", "asyncio.runners", "asyncio.base_events", "asyncio.events"),
        *("asyncio.threads", "concurrent.futures.thread", "buffer_rl.testing.lint_loss"),
        "buffer_rl.plugin.hooks",
    }
)
Answer = TypeVar("Answer")


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The shortest known name that begins with the three letters or more of ``name``, else the one most like it, or
    None. ``cutoff`` is difflib's ratio, from 0 to 1."""
    names = list(known)
    begun = [each for each in names if len(name) > 2 and each.startswith(name)]
    return min(begun or difflib.get_close_matches(name, names, n=1, cutoff=cutoff), key=len, default=None)


def list_names(names: Iterable[str]) -> str:
    """Names for a message, shortened after the first dozen."""
    ordered = sorted(set(names))
    shown = ", ".join(ordered[:_MOST_NAMES_SHOWN])
    left = len(ordered) - _MOST_NAMES_SHOWN
    return f"{shown} and {left} more" if left > 0 else shown


def plugin_error(
    kind: PluginKind | None,
    reference: str,
    what: str,
    *,
    origin: str = "",
    actual: str = "",
    suggestion: str | None = None,
    known: Iterable[str] = (),
    hint: str = "",
) -> PluginError:
    """Build the error; the caller raises it.

    kind: None where none was named: for a whole pluggy plugin (``-p NAME``), or while the kind is guessed.
    origin: file, line, distribution, as far as known.
    actual: the signature that was found. suggestion: the reference that was probably meant.
    """
    named = list_names(known)
    question = f"did you mean {suggestion!r}?" if suggestion else ""
    facts = "; ".join(part for part in (f"known names: {named}" if named else "", hint) if part)
    if kind is None:
        subject = "plugin"
        expected = "package.module:name, ./file.py:name, or a name that is installed or registered"
    else:
        subject = kind.name
        expected = f"{kind.signature}, for {' or '.join(kind.flags)}"
    what = f"{what}; found {actual}" if actual else what
    where = f"{subject} {reference!r}" + (f" ({origin})" if origin else "")
    return PluginError(what, where=where, expected=expected, hint=f"{question} {facts}".strip())


class UncommonError(Exception):
    """Stands for an exception (``__cause__``) that ``except Exception`` does not catch, or a future cannot carry."""


class contained:
    """For a block that runs code of a user: SystemExit, KeyboardInterrupt, CancelledError and StopIteration of that
    code become UncommonError. A signal that ends the run passes (EndedBySignal), and so do ``passing``. A process that
    the code has forked ends with the block: it would go on with the caller's work, on the caller's connections."""

    def __init__(self, *passing: type[BaseException]) -> None:
        self._passing: tuple[type[BaseException], ...] = (EndedBySignal, *passing)

    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if os.getpid() != self._process:
            code = error.code if isinstance(error, SystemExit) else error
            os._exit(code if isinstance(code, int) else code is not None)
        common = isinstance(error, Exception) and not isinstance(error, StopIteration)
        if error is not None and not common and not isinstance(error, self._passing):
            raise UncommonError(error_name(error)) from error


def in_thread(
    name: str, function: Callable[..., Answer], *arguments: object
) -> tuple[Future[Answer], threading.Thread]:
    """Call a function, in a thread of that name and with the caller's context. The process does not wait for it; who
    waits for the answer may give one."""
    future: Future[Answer] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            with contained():
                end = partial(future.set_result, context.run(function, *arguments))
        except Exception as error:  # fault boundary: the function may be a user's
            end = partial(future.set_exception, error)
        with contextlib.suppress(InvalidStateError):  # its deadline has passed
            end()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return future, thread


async def contained_task(work: Awaitable[Answer]) -> Answer:
    """Await ``work`` as a task of its own: only the cancellation of that task passes."""
    with contained(asyncio.CancelledError, GeneratorExit):
        return await work


async def awaited(work: Awaitable[Answer], loop: asyncio.AbstractEventLoop | None = None) -> Answer:
    """Await ``work`` of a user, in a task of its own. It is cancelled with the caller; a CancelledError or
    GeneratorExit of its own is an UncommonError. loop: that of another thread, in which the task runs."""
    task: asyncio.Future[Answer]
    if loop is None:
        task = asyncio.ensure_future(contained_task(work))
    else:
        task = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(contained_task(work), loop))
    caller = asyncio.current_task()
    assert caller is not None
    before = caller.cancelling()  # in Python 3.11 a task group that failed leaves a count behind
    try:
        return await task
    except (asyncio.CancelledError, GeneratorExit) as error:
        if caller.cancelling() > before or not task.done():
            raise
        raise UncommonError(error_name(error)) from error


def original(error: BaseException) -> BaseException:
    """What the code raised."""
    return error.__cause__ or error if isinstance(error, UncommonError) else error


def error_name(error: BaseException) -> str:
    """``ValueError: its text``, of what the code raised."""
    error = original(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def error_text(error: BaseException) -> str:
    """``error_name`` and the last lines of the traceback, without the first frame (the caller's own), and without those
    of the functions that call users' code."""
    raised_there = original(error)
    frames = own = raised_there.__traceback__
    while frames is not None and frames.tb_next is not None:
        module = str(frames.tb_frame.f_globals.get("__name__"))
        if frames is not own and module not in _CALLERS and not module.startswith("pluggy."):
            break
        frames = frames.tb_next
    lines = "".join(traceback.format_exception(type(raised_there), raised_there, frames)).rstrip().splitlines()
    return "\n".join([error_name(error), *(f"    {line}" for line in lines[-TAIL_LINES:])])


def place(kind: str, reference: object, at: str = "") -> str:
    """``filter 'my_module:fn', group ...``: the ``where`` of an error about a plugin that was called."""
    return f"{kind} {reference!r}" + (f", {at}" if at else "")


def raised(
    kind: str,
    reference: object,
    error: BaseException,
    *,
    at: str = "",
    error_class: type[BufferRLError] = PluginError,
) -> BufferRLError:
    """The error that says that a plugin raised ``error``, with the end of its traceback, or with what to do about a
    full disk; the caller raises it."""
    if os.strerror(errno.ENOSPC) in str(error):  # of any class: libraries have their own
        hint = "make room for --run-dir, --save and TMPDIR, and go on with --load auto"
        see = "docs/troubleshooting.md#the-disk-is-full"
        return error_class(f"it raised {error_name(error)}", where=place(kind, reference, at), hint=hint, see=see)
    return error_class(f"it raised {error_text(error)}", where=place(kind, reference, at))


def returned(
    kind: str,
    reference: object,
    value: object,
    expected: str,
    *,
    at: str = "",
    hint: str = "",
    error_class: type[BufferRLError] = PluginError,
) -> BufferRLError:
    """The error that says that a plugin returned something that it must not; the caller raises it."""
    if value is None and not hint:
        hint = "a function without a return statement returns None"
    return error_class(
        f"it returned {short_repr(value)}", where=place(kind, reference, at), expected=expected, hint=hint
    )


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of the process's event-loop policy, which code of the user may have set. Raises PluginError if the policy
    raises."""
    try:
        with contained():
            return asyncio.new_event_loop()
    except Exception as error:  # fault boundary: a policy of the user's
        what = f"the event-loop policy does not give a loop: {error_text(error)}"
        hint = "take out asyncio.set_event_loop_policy, or set a policy that works"
        raise PluginError(what, where=f"{type(asyncio.get_event_loop_policy()).__module__}", hint=hint) from error


def call(
    kind: str,
    reference: object,
    function: Callable[..., Answer],
    *arguments: Any,
    at: str = "",
    error_class: type[BufferRLError] = PluginError,
) -> Answer:
    """``function(*arguments)``; what it raises becomes ``raised``, errors of ``buffer_rl.errors`` pass as they are."""
    try:
        with contained():
            return function(*arguments)
    except BufferRLError:
        raise
    except Exception as error:  # fault boundary: a plugin's code
        raise raised(kind, reference, error, at=at, error_class=error_class) from error


def construct(
    kind: str,
    reference: object,
    factory: Callable[..., Any],
    *arguments: Any,
    error_class: type[BufferRLError] = PluginError,
) -> Any:
    """What the class or factory of a constructed kind builds, behind ``Guarded``.

    Raises PluginError if it raises, or if what it builds lacks a method of the kind.
    """
    row = kind_named(kind)
    built = call(kind, reference, factory, *arguments, at="while it was constructed")
    missing = [name for name in row.methods if not callable(getattr(built, name, None))]
    if missing:
        expected = f"an object with {', '.join(row.methods)}"
        hint = row.changed_hint(built) or f"no {missing[0]}"
        raise returned(kind, reference, built, expected, at="while it was constructed", hint=hint)
    return Guarded(kind, reference, built, error_class, row.methods)


@dataclass(eq=False, repr=False)
class Guarded:
    """An object of a constructed kind; whatever a method of the kind raises names the plugin and the method, and so
    does a PluginError that it raises without a place.

    Everything else is the object's own. What an iterator raises on the way counts as the method's.
    methods: those that are guarded.
    """

    kind: str
    reference: object
    built: Any
    _error_class: type[BufferRLError]
    _methods: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.built, name)
        if name not in self._methods:
            return value

        def guarded(*args: Any, **kwargs: Any) -> Any:
            answer = self._run(name, lambda: value(*args, **kwargs))
            return self._iterate(name, answer) if isinstance(answer, Iterator) else answer

        return guarded

    def _iterate(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        while (item := self._run(name, lambda: next(items, _END))) is not _END:
            yield item

    def _run(self, name: str, step: Callable[[], Any]) -> Any:
        try:
            return call(self.kind, self.reference, step, at=name, error_class=self._error_class)
        except PluginError as error:
            error.where = error.where or place(self.kind, self.reference, name)
            raise


_END = object()
