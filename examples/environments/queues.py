"""Agents that talk to the model through queues: ``collect_trajectory(prompt, env, obs_queue, act_queue)``.

    buffer-rl train --agent-path examples/environments/queues.py:play ...

The agent puts an observation into ``obs_queue``, token ids or messages, takes the answer from ``act_queue``, and steps
its environment. ``play`` is the agent function between them and the session; the rest is an example of such an agent.
"""

from __future__ import annotations

import asyncio
from typing import Any


async def play(args: Any, sample: Any, session: Any) -> float:
    """The reward is what the agent returns."""
    obs_queue, act_queue = asyncio.Queue[Any](), asyncio.Queue[Any]()
    agent, env = CountingAgent(), CountingEnvironment(goal=int(sample.label))
    collecting = asyncio.ensure_future(agent.collect_trajectory(sample.prompt, env, obs_queue, act_queue))
    answering = asyncio.ensure_future(answer(session, obs_queue, act_queue))
    try:
        done, _ = await asyncio.wait({collecting, answering}, return_when=asyncio.FIRST_COMPLETED)
        return float(done.pop().result())  # of the agent, as the other one only ever raises
    finally:
        collecting.cancel()
        answering.cancel()


async def answer(session: Any, obs_queue: asyncio.Queue[Any], act_queue: asyncio.Queue[Any]) -> float:
    """Ask the model for each observation: behind exactly these ids, or by its chat template."""
    while True:
        observation = await obs_queue.get()
        if isinstance(observation[0], int):
            await act_queue.put((await session.generate(observation)).output_ids)
        else:
            await act_queue.put(await session.chat(observation))


class CountingEnvironment:
    """Wants the numbers from 1 to ``goal``, one in each step."""

    def __init__(self, goal: int) -> None:
        self._goal, self._number = goal, 0

    async def reset(self) -> str:
        """The first observation."""
        return f"count to {self._goal}"

    async def step(self, action: str) -> tuple[str, float, bool]:
        """A share of 1 for each right number; a wrong one ends it."""
        self._number += 1
        is_right = action.strip() == str(self._number)
        return "go on", is_right / self._goal, not is_right or self._number == self._goal


class CountingAgent:
    """Sends the conversation as messages, and sums the rewards."""

    async def collect_trajectory(
        self, prompt: Any, env: Any, obs_queue: asyncio.Queue[Any], act_queue: asyncio.Queue[Any]
    ) -> float:
        """Play until the environment is done."""
        messages = [{"role": "user", "content": f"{prompt} {await env.reset()}"}]
        total, is_done = 0.0, False
        while not is_done:
            await obs_queue.put(list(messages))
            message = await act_queue.get()
            observation, reward, is_done = await env.step(message["content"] or "")
            messages += [message, {"role": "user", "content": observation}]
            total += reward
        return total
