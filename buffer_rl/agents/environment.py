"""The built-in agent that plays ``--environment``: a class with ``reset``, and ``step`` or tools.

An environment is made for one play, and lives in a thread of that play's own, with an event loop. So no environment
holds up another, or the requests of one. Whatever ends the play, its ``close`` is called once, and the processes that
it has started and left behind are ended. A method that hangs is left in its thread; what it answers later is dropped.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from functools import partial
from threading import Lock
from typing import Any

from buffer_rl.agents.leftovers import GONE_S, Mark
from buffer_rl.agents.messages import Message, calls_of
from buffer_rl.agents.runner import AgentLoop, AgentTimeoutError, deadline
from buffer_rl.agents.session import AgentFailedError, Session, SessionHandle
from buffer_rl.agents.tools import (
    OF_ENVIRONMENTS,
    ToolFaults,
    messages_of,
    refusal_of,
    result_message,
    text_of_result,
    tools_of,
)
from buffer_rl.args import Args
from buffer_rl.engines.protocol import seed_of
from buffer_rl.errors import RewardError, short_repr
from buffer_rl.kinds.agent import GiveUp
from buffer_rl.kinds.reward import check_reward
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.calls import awaited, error_text
from buffer_rl.plugin.signature import keywords_for, takes
from buffer_rl.records.groups import Sample
from buffer_rl.rollout.lease import current_lease

_log = logging.getLogger(__name__)
FREE_S = 2.0
"""In which a method that runs at the end may return, before ``close`` is called beside it."""
CLOSE_S = 3.0


class Environments:
    """Runs ``--environment``: an instance for each play. Belongs to the worker's event loop."""

    blocking = True

    def __init__(self, factory: Callable[..., Any], args: Args) -> None:
        self._factory, self._args = factory, args
        self._ending: set[asyncio.Task[None]] = set()
        self._hung: list[Mark] = []
        self._schemas: list[Message] | None = None
        self._faults = ToolFaults()

    async def run(self, session: Session, handle: SessionHandle, prompt: Sample, *, name: str) -> Any:
        """The reward of one play; None if the environment gave none.

        Raises AgentFailedError for what the environment raises, GiveUp, and AgentTimeoutError at the deadline."""
        stage = _Stage(self._factory, self._args, name, self._faults)
        is_late = False
        try:
            async with deadline(name, self._args.agent_timeout_s):
                return await self._play(stage, session, prompt)
        except AgentTimeoutError:
            is_late = True
            raise
        finally:
            ending = asyncio.ensure_future(self._end(stage, is_late=is_late))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.wait({ending})  # it goes on if this is cancelled

    async def aclose(self) -> None:
        """Wait for what ends, and end the processes that hung methods have started since."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=FREE_S + CLOSE_S + GONE_S)
        for mark in self._hung:
            await mark.end_processes()

    async def _play(self, stage: _Stage, session: Session, prompt: Sample) -> Any:
        await stage.make()
        first = await stage.reset(_row_of(prompt, self._args.rollout_seed))
        messages = _begun(messages_of(prompt.prompt), first)
        if "step" in stage.has:
            total = await _step_until_done(stage, session, messages, of_turns=self._args.turn_rewards)
        else:
            if self._schemas is None:
                self._schemas = tools_of(type(stage.built))
            total = None
            await _call_tools(stage, session, messages, self._schemas)
        last = await stage.call("reward") if "reward" in stage.has else None
        return _sum_of(total, last, self._args.reward_key)

    async def _end(self, stage: _Stage, *, is_late: bool) -> None:
        hangs = not await stage.is_free()
        if stage.doing and (hangs or is_late):
            at = f"{stage.where()}; its thread is left to itself" if hangs else ""
            _log.warning("%s was in its %s at the end of the play%s", stage.name, stage.doing, at)
        if fault := await stage.close(beside=hangs):
            current_lease().count("agent/close_failed")
            _log.warning("%s: %s", stage.name, fault)
        if hangs:
            self._hung.append(stage.mark)
        if left := await stage.mark.end_processes():
            current_lease().count("agent/left_processes", len(left))
            shown = ", ".join(f"{pid} ({command})" for pid, command in left.items())
            _log.warning("%s left processes behind, which were ended: %s", stage.name, shown)


class _Stage:
    """One environment, in a thread of its own. Belongs to the worker's event loop.

    built: the instance, once it is made; only its threads touch it. has: which methods of the contract it has. doing:
    the method that runs, or ran when the play was cut; empty if none."""

    def __init__(self, factory: Callable[..., Any], args: Args, name: str, faults: ToolFaults) -> None:
        self.name, self.mark, self.doing, self._faults = name, Mark(), "", faults
        self.built: Any = None
        self.has: frozenset[str] = frozenset()
        self._make = partial(factory, user_args(args)) if _takes_args(factory) else factory
        self._lock, self._is_to_close, self._is_over = Lock(), False, False
        self._loop = self._new_loop()

    async def make(self) -> None:
        """Call the constructor. Raises what ``call`` raises."""
        await self._called("constructor", self._build)

    async def reset(self, row: Mapping[str, Any]) -> Any:
        """Call ``reset`` with what it takes of ``row``. Raises what ``call`` raises."""
        return await self._called("reset", lambda: self.built.reset(**keywords_for(self.built.reset, row)))

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the method returns. Raises GiveUp, and AgentFailedError for anything else that it raises."""
        return await self._called(method, lambda: getattr(self.built, method)(*arguments))

    async def tool(self, name: str, arguments: Any, tools: Collection[str]) -> str:
        """What the model is told of its call. Raises GiveUp."""
        if refusal := refusal_of(name, arguments, tools):
            return refusal
        try:
            return text_of_result(await self._run(name, lambda: getattr(self.built, name)(**arguments)))
        except GiveUp:
            raise
        except Exception as error:  # fault boundary: the tool is the user's, and its arguments the model's
            return self._faults.text_of(name, error)

    async def is_free(self) -> bool:
        """Whether the thread runs no method, now or within ``FREE_S``."""
        return await self._loop.answers(FREE_S)

    def where(self) -> str:
        """The line that hangs."""
        return self._loop.blocker()[1].removeprefix("a callback")

    async def close(self, *, beside: bool) -> str:
        """Call ``close`` once; what went wrong, or nothing. beside: in another thread, because this one hangs.

        An instance that a constructor returns only later is closed then."""
        with self._lock:
            self._is_over = True
        loops = [self._loop, *([self._new_loop()] if beside else [])]
        fault = ""
        try:
            async with asyncio.timeout(CLOSE_S):
                await _in_loop(loops[-1], self._close_once)
        except TimeoutError:
            fault = f"its close was not done within {CLOSE_S:g} s"
        except Exception as error:  # fault boundary: the environment is the user's
            fault = f"its close raised {error_text(error)}"
        for each in loops:
            each.loop.call_soon_threadsafe(each.loop.stop)
        return fault

    async def _called(self, method: str, work: Callable[[], Any]) -> Any:
        try:
            return await self._run(method, work)
        except (GiveUp, AgentFailedError):
            raise
        except Exception as error:  # fault boundary: the environment is the user's
            raise AgentFailedError(f"its {method} raised {error_text(error)}") from error

    async def _run(self, method: str, work: Callable[[], Any]) -> Any:
        self.doing = method
        try:
            answer = await _in_loop(self._loop, work)
        except Exception:
            self.doing = ""
            raise
        self.doing = ""
        return answer

    def _build(self) -> Any:
        built = self._make()
        self.has = frozenset(name for name in OF_ENVIRONMENTS if callable(getattr(built, name, None)))
        if "reset" not in self.has:
            raise _returned("constructor", built, "an object with reset")
        with self._lock:
            self.built, self._is_to_close, is_late = built, True, self._is_over
        return self._close_once() if is_late else None

    def _close_once(self) -> Any:
        with self._lock:
            is_first, self._is_to_close = self._is_to_close, False
        return self.built.close() if is_first and "close" in self.has else None

    def _new_loop(self) -> AgentLoop:
        made = AgentLoop()
        made.loop.call_soon_threadsafe(self.mark.put)
        return made


async def _in_loop(loop: AgentLoop, work: Callable[[], Any]) -> Any:
    """What ``work()`` returns there, awaited if it is asynchronous. Raises subclasses of Exception alone."""

    async def called() -> Any:
        answer = work()
        return await answer if inspect.isawaitable(answer) else answer

    return await awaited(called(), loop.loop)


async def _step_until_done(stage: _Stage, session: Session, messages: list[Message], *, of_turns: bool) -> float | None:
    """The sum of the rewards of the steps; None if no step gave one. of_turns: each belongs to its answer."""
    total: float | None = None
    is_done = False
    while not is_done:
        message = await _asked(session, messages)
        answer = await stage.call("step", str(message.get("content") or ""))
        if not isinstance(answer, tuple | list) or len(answer) not in (3, 5):
            raise _returned("step", answer, "(observation, reward, done)")
        observation, reward, *ends = answer
        is_done = any(bool(end) for end in ends[:2])
        seen = _messages("step", observation)
        if not seen and not is_done:
            raise _returned("step", answer, "an observation, unless it is done")
        messages += [message, *seen]
        if reward is not None:
            number = _number("step", reward)
            total = (total or 0.0) + number
            if of_turns:
                session.reward(number)
    return total


async def _call_tools(stage: _Stage, session: Session, messages: list[Message], schemas: list[Message]) -> None:
    """Until an answer has no calls."""
    names = [schema["function"]["name"] for schema in schemas]
    while (message := await _asked(session, messages, schemas)).get("tool_calls"):
        results = [result_message(call, await stage.tool(**of, tools=names)) for call, of in calls_of(message)]
        messages += [message, *results]


async def _asked(session: Session, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Message:
    return (await session.chat(messages, tools)).reply.message


def _takes_args(factory: Callable[..., Any]) -> bool:
    """Whether it is made with the options: it has a parameter ``args``, or cannot be called without an argument."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return False
    own = signature.parameters.get("args")
    return (own is not None and own.kind is own.POSITIONAL_OR_KEYWORD) or not takes(factory, 0)


def _row_of(prompt: Sample, run_seed: int) -> dict[str, Any]:
    """What ``reset`` is told: a copy, as the samples of a group share their metadata."""
    own = {"prompt": prompt.prompt, "label": prompt.label}
    return deepcopy({"seed": seed_of(f"{run_seed}|{prompt.uid}"), **(prompt.metadata or {}), **own})


def _begun(messages: list[Message], first: Any) -> list[Message]:
    """The prompt, and what ``reset`` returned: a text belongs to the user's message that ends the prompt."""
    more, last = _messages("reset", first), messages[-1] if messages else {}
    if isinstance(first, str) and last.get("role") == "user" and isinstance(last["content"], str):
        text = "\n\n".join(part for part in (last["content"], first) if part)
        return [*messages[:-1], {**last, "content": text}]
    return [*messages, *more]


def _messages(method: str, value: Any) -> list[Message]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    found = [value] if isinstance(value, Mapping) else value
    if not isinstance(found, list | tuple) or not all(isinstance(each, Mapping) and "role" in each for each in found):
        raise _returned(method, value, "a text, messages or None")
    return [dict(each) for each in found]


def _sum_of(total: float | None, last: Any, key: str | None) -> float | dict[str, Any] | None:
    """The reward of the play: the steps', and what ``reward`` returned."""
    if last is None or total is None:
        return total if last is None else last  # looked at by the caller
    if not isinstance(last, Mapping):
        return total + _number("reward", last)
    if key is None:
        raise _returned("reward", last, "a number; or set --reward-key, which says what of a mapping is trained on")
    return {**last, key: total + (_number("reward", last[key]) if key in last else 0.0)}


def _number(method: str, value: Any) -> float:
    try:
        number = check_reward(value, where=f"its {method}")
    except RewardError as error:
        raise AgentFailedError(f"its {method} gave a wrong reward: {error.what}", expected="a finite number") from error
    if isinstance(number, dict):
        raise _returned(method, value, "a number as the reward")
    return number


def _returned(method: str, value: Any, expected: str) -> AgentFailedError:
    return AgentFailedError(f"its {method} returned {short_repr(value)}", expected=expected)
