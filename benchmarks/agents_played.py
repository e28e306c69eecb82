"""What ``agents.py`` measures: one agent of four turns, in the ways in which it can ask, and the same without one."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from types import MappingProxyType
from typing import Any

TURNS = 4
WAYS = MappingProxyType(
    {
        "session.chat": "chat",
        "environment": "Environment",
        "aiohttp": "raw",
        "one client": "one_client",
        "new client": "new_client",
    }
)
"""The functions of this file, and the environment, by what tables call them."""
Ask = Callable[[list[dict[str, Any]]], Awaitable[str]]


async def _play(sample: Any, ask: Ask) -> float:
    messages = list(sample.prompt)
    for _ in range(TURNS):
        answer = await ask(messages)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    return 1.0


async def chat(args: Any, sample: Any, session: Any) -> float:
    """By a call of the session."""

    async def ask(messages: list[dict[str, Any]]) -> str:
        return (await session.chat(messages))["content"] or ""

    return await _play(sample, ask)


class Environment:
    """The same conversation as an environment."""

    def reset(self) -> None:
        """Begin."""
        self._turn = 0

    def step(self, action: str) -> tuple[str, float, bool]:
        """Go on."""
        self._turn += 1
        return "go on", 0.25, self._turn == TURNS


async def raw(args: Any, sample: Any, session: Any) -> float:
    """By HTTP, with nothing but aiohttp."""

    async def ask(messages: list[dict[str, Any]]) -> str:
        body, headers = {"model": "policy", "messages": messages}, {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/chat/completions"
        async with _connections(asyncio.get_running_loop()).post(url, json=body, headers=headers) as response:
            return (await response.json())["choices"][0]["message"]["content"] or ""

    return await _play(sample, ask)


async def one_client(args: Any, sample: Any, session: Any) -> float:
    """With one client of the openai package for all samples."""
    return await _with_client(
        _client(asyncio.get_running_loop()).with_options(base_url=session.base_url, api_key=session.api_key), sample
    )


async def new_client(args: Any, sample: Any, session: Any) -> float:
    """With a client of the openai package for this sample."""
    import openai

    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        return await _with_client(client, sample)


async def generate_turn(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A generate function with as many requests."""
    from buffer_rl.rollout import generate

    for number in range(TURNS):
        await generate.generate_turn(args, sample, sampling_params)
        if number < TURNS - 1:
            generate.add_observation(sample, "ugo ona")
    return sample


async def _with_client(client: Any, sample: Any) -> float:
    async def ask(messages: list[dict[str, Any]]) -> str:
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return answer.choices[0].message.content or ""

    return await _play(sample, ask)


@functools.cache
def _connections(loop: asyncio.AbstractEventLoop) -> Any:
    """Those of one event loop: it cannot use those of another."""
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


@functools.cache
def _client(loop: asyncio.AbstractEventLoop) -> Any:
    import openai

    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")
