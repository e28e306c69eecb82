"""Cases of token-exactness that concern requests: what clients do, and the turns that are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import openai

from buffer_rl.agents.turns import Turn
from harness.agent_play import AgentEngine, user
from harness.dialects import CALLS, DIALECTS, address_over, losing_line

MARK = {"x-stainless-retry-count": "1"}
"""By which a client says that it repeats a request."""


async def repeated(history: str) -> list[Turn]:
    """An answer is lost and asked for again by the client itself; another is asked for twice while it runs."""
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    answers = iter(["one"])
    engine = AgentEngine(lambda prompt, params: next(answers, None) or said)
    async with address_over(engine, agent_history=history) as (session, url, key):
        async with losing_line(url) as (line, _), openai.AsyncOpenAI(base_url=line, api_key=key) as client:
            await client.chat.completions.create(model="m", messages=user("go"))
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            engine.asked.clear()
            first = asyncio.ensure_future(client.chat.completions.create(model="m", messages=user("on")))
            await engine.asked.wait()
            again = client.chat.completions.create(model="m", messages=user("on"), extra_headers=MARK)
            second = asyncio.ensure_future(again)
            await asyncio.wait({second}, timeout=0.05)
            said.set_result("two")
            assert (await first).id == (await second).id
        return [each.turn for each in session.exchanges]


async def left(history: str) -> list[Turn]:
    """A client disconnects, and asks for the answer later."""
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = AgentEngine(lambda prompt, params: said)
    async with address_over(engine, agent_history=history) as (session, url, key):
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            task = asyncio.ensure_future(client.chat.completions.create(model="m", messages=user("go"), stream=True))
            await engine.asked.wait()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            said.set_result("one")
            await client.chat.completions.create(model="m", messages=user("go"), stream=True, extra_headers=MARK)
        return [each.turn for each in session.exchanges]


async def in_each_dialect(history: str) -> list[Turn]:
    """One conversation of three answers, in each dialect, streamed or not: the turns of all are equal."""
    found: list[list[Turn]] = []
    for play in DIALECTS.values():
        for stream in (False, True):
            answers = iter([CALLS, "done", "end"])

            def say(prompt: str, params: Any, answers: Any = answers) -> str:
                return str(next(answers))

            async with address_over(AgentEngine(say), agent_history=history) as (session, url, key):
                await play(url, key, stream, ["go", "more"])
                found.append([each.turn for each in session.exchanges])
    assert all(turns == found[0] for turns in found)
    return found[0]


async def too_long(history: str) -> list[Turn]:
    """A prompt is longer than the context, and the agent asks for a shorter one; the answer reaches the limit."""
    engine = AgentEngine(lambda prompt, params: "endless")
    async with address_over(engine, agent_history=history, rollout_max_context_len=8) as (session, url, key):
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            with suppress(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=user("123456"))
                raise AssertionError("it is refused")
            await client.chat.completions.create(model="m", messages=user("12"))
        return [each.turn for each in session.exchanges]


CASES: dict[int, tuple[str, str, Callable[[str], Awaitable[list[Turn]]]]] = {
    15: (
        "a client repeats a request after a lost answer, or while the first still runs",
        "the recorded answer; one turn",
        repeated,
    ),
    16: ("a client disconnects", "the answer is recorded and trained all the same", left),
    17: ("streamed or not; chat, responses, Messages", "the same turns, the same ids", in_each_dialect),
    20: (
        "a prompt longer than the context",
        "refused (400), truncated; no row without a sampled token",
        too_long,
    ),
}
