"""Calls a user's function from the event loop, whether it is synchronous or not."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from buffer_rl.errors import BufferRLError, RolloutError
from buffer_rl.resolution.calls import raised
from buffer_rl.rollout.failures import status_of


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` gives something to await; objects with an asynchronous ``__call__`` count."""
    called = getattr(function, "__call__", None)  # noqa: B004 (not whether it can be called, but how)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


async def call_user(function: Callable[..., Any], invoke: Callable[[], Any]) -> Any:
    """``invoke()``, which calls ``function`` with its arguments.

    A synchronous function runs in a thread, so that it cannot hold up the event loop; an awaitable that it
    returns is awaited.
    """
    if is_async(function):
        return await invoke()
    answer = await asyncio.to_thread(invoke)
    return await answer if inspect.isawaitable(answer) else answer


async def call_plugin(
    kind: str, reference: object, function: Callable[..., Any], *arguments: Any, at: str, **keywords: Any
) -> Any:
    """``call_user`` for a plugin: what it raises becomes a RolloutError that names it, and bears its HTTP status if it
    has one; the project's errors pass."""
    try:
        return await call_user(function, partial(function, *arguments, **keywords))
    except BufferRLError:
        raise
    except Exception as error:  # fault boundary: the user's code
        named = raised(kind, reference, error, at=at, error_class=RolloutError)
        named.status = status_of(error)
        raise named from error
