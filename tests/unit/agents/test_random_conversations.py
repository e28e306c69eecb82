"""Conversations that agents might have, with the embedded engine in this process: branches, edits, repetitions,
parallel calls, sub-agents. Each sampled token is trained once, behind the ids that the engine saw."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.agents.session import Limits, Session
from buffer_rl.agents.turns import rows
from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.sampling import LogProbDetails, SamplingParams
from buffer_rl.embedded.scheduler import Request, Scheduler
from buffer_rl.engines.client import GenerateResult
from buffer_rl.records.groups import VersionSpan
from buffer_rl.rollout.generate import sampling_params_for
from buffer_rl.rollout.lease import Lease
from buffer_rl.rollout.requests import Requests
from buffer_rl.testing.fake_buffer import FakeBuffer
from harness.agent_play import END, AgentEngine, context_of, make_groups, make_ticket

Trained = Counter[tuple[int, int]]
"""How often a token follows the ids with this hash."""
AT_ONCE = 16
MOST_TOKENS = 6
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@dataclass
class Embedded(AgentEngine):
    """The embedded engine's scheduler. sampled: what it answered, by the requests' ids; see ``Trained``."""

    scheduler: Any = None
    waiting: dict[str, asyncio.Future[Request]] = field(default_factory=dict)
    sampled: Trained = field(default_factory=Counter)

    async def agenerate(
        self, rid: str, input_ids: Sequence[int], sampling_params: dict[str, Any], **_: Any
    ) -> GenerateResult:
        params = SamplingParams(
            max_new_tokens=sampling_params["max_new_tokens"], stop_token_ids=frozenset({END}), temperature=1.0
        )
        request = Request(rid=rid, prompt_ids=tuple(input_ids), params=params, seed=sampling_params["sampling_seed"])
        answer = self.waiting[rid] = asyncio.get_running_loop().create_future()
        self.scheduler.add(request)
        await answer
        self.sampled += trained([*input_ids, *request.output_ids], [1] * len(request.output_ids))
        reason = (request.finish_reason or {})["type"]
        return GenerateResult(
            output_ids=list(request.output_ids),
            text="",
            log_probs=list(request.log_probs),
            finish_reason=reason,
            spans=[VersionSpan(3, 0, len(request.output_ids))],
            matched=END if reason == "stop" else None,
        )

    async def work(self) -> None:
        """Answer requests until cancelled."""
        while True:
            for request in self.scheduler.step() if self.scheduler.has_work else ():
                self.waiting.pop(request.rid).set_result(request)
            await asyncio.sleep(0)

    def scores(self, tokens: Sequence[int], start: int) -> list[float]:
        """Log-probabilities of the tokens behind the first ``start``."""
        request = Request(rid="score", prompt_ids=tuple(tokens), params=SamplingParams(max_new_tokens=0), seed=0)
        request.details = LogProbDetails(start=start - 1)
        self.scheduler.add(request)
        while self.scheduler.has_work:
            self.scheduler.step()
        found: list[float] = request.details.input_log_probs
        return found


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


@pytest.mark.parametrize("number", [30, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("history", ["template", "append"])
async def test_each_sampled_token_of_random_conversations_is_trained_once_behind_the_ids_that_the_engine_saw(
    model_folder: Callable[..., str], number: int, history: str
) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder("qwen3"), dtype=torch.float32).eval()
    engine = Embedded(scheduler=Scheduler(FastDecoder(model, 512, deterministic=False), max_running_requests=AT_ONCE))
    sessions: list[Session] = []
    places = asyncio.Semaphore(AT_ONCE)
    async with context_of(engine, rollout_max_response_len=MOST_TOKENS, agent_history=history) as context:
        params, limits = sampling_params_for(context.args, evaluation=False), Limits.of(context.args)

        async def play(row: int) -> None:
            async with places:
                (group,) = make_groups(1, 1, first=row)
                lease = Lease.of(context, FakeBuffer([group], make_ticket(1)), group, Requests())
                sessions.append(Session(lease, group[0], params, limits))
                await Talker(sessions[-1], random.Random(row)).play()

        work = asyncio.ensure_future(engine.work())
        await asyncio.gather(*map(play, range(number)))
        work.cancel()
    made = [row for session in sessions for row in rows(each.turn for each in session.exchanges)]
    total = sum((trained(row.tokens, row.loss_mask) for row in made), Counter())
    assert total == engine.sampled
    assert total.total() > 8 * number
    assert sum((session.causes for session in sessions), Counter()).keys() >= {"new", "extends", "changed"}
    for row in made:
        start = len(row.tokens) - row.response_length
        scores = engine.scores(row.tokens, start)
        for mask, recorded, score in zip(row.loss_mask, row.rollout_log_probs, scores, strict=True):
            assert not mask or abs(recorded - score) < 1e-4
