"""``run``: a coroutine from a synchronous function, on the event loop that runs the rollouts."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from contextvars import copy_context
from typing import Any, TypeVar

from buffer_rl.errors import RolloutError
from buffer_rl.rollout.context import context_or_none

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, with the caller's context variables. In a rollout it runs on the rollout's event loop, to
    which engines and rewards belong, while the caller's thread waits, at most ``--rollout-timeout-s``; elsewhere on an
    event loop of its own.

    Raises RolloutError if it is called on the rollout's event loop itself, which could never go on.
    """
    context = context_or_none()
    loop = context.loop if context is not None else None
    if context is None or loop is None or not loop.is_running():
        return asyncio.run(work)
    if _is_current(loop):
        work.close()
        raise RolloutError(
            "run() is called in a coroutine, which would wait for itself",
            where="slime.utils.async_utils.run",
            expected="a synchronous function",
            hint="await the coroutine instead",
        )
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    tasks: list[asyncio.Task[None]] = []
    variables = copy_context()

    async def finish() -> None:
        try:
            done.set_result(await work)
        except asyncio.CancelledError:
            done.cancel()
            raise
        except BaseException as error:  # the caller's thread raises it
            done.set_exception(error)

    loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(finish(), context=variables)))
    try:
        return done.result(timeout=context.args.rollout_timeout_s)
    except TimeoutError:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
        raise


def _is_current(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
