"""Conversations that agents might have: branches, edits, repetitions, parallel calls, sub-agents."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from buffer_rl.agents.session import Session
from buffer_rl.engines.client import GenerateResult
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.generate import sampling_params_for
from buffer_rl.rollout.lease import Lease
from buffer_rl.rollout.requests import Requests
from buffer_rl.testing.fake_buffer import FakeBuffer
from harness.agent_play import make_groups, make_ticket

Trained = Counter[tuple[int, int]]
"""How often a token follows the ids with this hash."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@dataclass
class Noting:
    """An engine's client that notes what it is answered. sampled: by the ids of requests; see ``Trained``."""

    engine: Any
    sampled: Trained = field(default_factory=Counter)

    async def agenerate(self, rid: str, input_ids: Sequence[int], *arguments: Any, **options: Any) -> GenerateResult:
        result: GenerateResult = await self.engine.agenerate(rid, input_ids, *arguments, **options)
        self.sampled += trained([*input_ids, *result.output_ids], [1] * len(result.output_ids))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def trained(tokens: Sequence[int], mask: Sequence[int]) -> Trained:
    start = len(tokens) - len(mask)
    return Counter((hash(tuple(tokens[: start + i])), tokens[start + i]) for i, one in enumerate(mask) if one)


class Talker:
    """One agent that does what chance wants. threads: histories that end with an answer."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        self.session, self.rng = session, rng
        self.threads: list[list[dict[str, Any]]] = []

    async def play(self) -> None:
        await self.ask([{"role": "system", "content": self.words()}, *self.said()])
        for _ in range(self.rng.randrange(1, 6)):
            await self.rng.choice([self.go_on, self.branch, self.edit, self.repeat, self.several, self.sub_agent])()

    async def ask(self, messages: list[dict[str, Any]]) -> None:
        tools = TOOLS if self.rng.random() < 0.2 else ()
        most = self.rng.choice([None, 2, 4])
        exchange = await self.session.chat(messages, tools, max_tokens=most)
        assert exchange.answer is not None
        self.threads.append([*messages, exchange.answer.message])

    async def go_on(self) -> None:
        await self.ask([*self.threads[-1], *self.said()])

    async def branch(self) -> None:
        thread = self.rng.choice(self.threads)
        answers = [place for place, message in enumerate(thread) if message["role"] == "assistant"]
        await self.ask([*thread[: self.rng.choice(answers) + 1], *self.said()])

    async def edit(self) -> None:
        thread = [dict(message) for message in self.rng.choice(self.threads)]
        self.rng.choice(thread)["content"] = self.words()
        await self.ask([*thread, *self.said()])

    async def repeat(self) -> None:
        await self.ask(self.rng.choice(self.threads)[:-1])

    async def several(self) -> None:
        thread = self.rng.choice(self.threads)
        same = [*thread, *self.said()]
        await asyncio.gather(self.ask(same), self.ask(same), self.ask([*thread, *self.said()]))

    async def sub_agent(self) -> None:
        """One with a conversation of its own, whose last answer is compacted into the first one's."""
        await self.ask(self.said())
        content = str(self.threads[-1][-1]["content"])
        await self.ask([*self.rng.choice(self.threads), {"role": "tool", "content": content, "tool_call_id": "1"}])

    def said(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.words()} for _ in range(self.rng.choice([1, 1, 2]))]

    def words(self) -> str:
        return "".join(self.rng.choices("ab12 <eos>", k=self.rng.randrange(5)))


async def converse(context: RolloutContext, number: int, at_once: int) -> list[Session]:
    """The sessions of ``number`` conversations; each is what its number wants."""
    params = sampling_params_for(context.args, evaluation=False)
    sessions: list[Session] = []
    places = asyncio.Semaphore(at_once)

    async def play(row: int) -> None:
        async with places:
            (group,) = make_groups(1, 1, first=row)
            lease = Lease.of(context, FakeBuffer([group], make_ticket(1)), group, Requests())
            sessions.append(Session(lease, group[0], params))
            await Talker(sessions[-1], random.Random(row)).play()

    await asyncio.gather(*map(play, range(number)))
    return sessions
