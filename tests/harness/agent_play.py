"""Agents over an engine in this process: what the tests of sessions, gateway, runner and plays share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai

from buffer_rl.agents.gateway import Gateway
from buffer_rl.agents.journal import Play
from buffer_rl.agents.session import Session
from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import GenerateResult
from buffer_rl.engines.protocol import RowSeeds
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Ticket, VersionSpan
from buffer_rl.rollout.context import RolloutContext, RunStart
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.generate import sampling_params_for
from buffer_rl.rollout.lease import Lease
from buffer_rl.rollout.requests import Requests
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.tiny import make_char_tokenizer
from harness.fake_client import client_of

TEMPLATE = (
    "{% if tools %}T{% for tool in tools %}{{ tool.function.name }},{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}a{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>"
    "{% else %}{{ message.role[0] + message.content }}{% endif %}{% endfor %}{{ 'a' if add_generation_prompt }}"
)
"""``u1+1a``, and the model goes on: ``2<eos>``; a tool's answer begins with ``t``."""
END = 1
LOG_PROB = -0.5
Say = Callable[[str, dict[str, Any]], Any]


def chat_tokenizer() -> Any:
    """One token a character, with a chat template."""
    tokenizer = make_char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


async def agent_of_options(args: Any, sample: Any, session: Any) -> None:
    """What ``--agent-path`` names in tests, which put their own in its place."""


@dataclass
class AgentEngine:
    """say: the answer's text to the text of a prompt and the parameters, or something to await that gives it; what it
    raises, the engine raises. Texts end with ``<eos>``, or at the limit of tokens.

    experts: whether answers have those of their tokens, which are the token's place and the number of the request.
    calls: rid, prompt ids and parameters of each request. starts: the first token whose experts were asked.
    aborted: ids of those that ``abort`` ended. cancelled: of those whose caller was cancelled. asked, ended: set with
    the first request, and when one ends."""

    say: Say = lambda prompt, params: "x"
    version: int = 3
    experts: bool = False
    tokenizer: Any = field(default_factory=chat_tokenizer)
    calls: list[tuple[str, list[int], dict[str, Any]]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _running: dict[str, asyncio.Task[str]] = field(default_factory=dict)

    async def agenerate(
        self,
        rid: str,
        input_ids: Sequence[int],
        sampling_params: dict[str, Any],
        *,
        experts_start: int = 0,
        **_: Any,
    ) -> GenerateResult:
        self.calls.append((rid, list(input_ids), sampling_params))
        self.starts.append(experts_start)
        number = len(self.starts)
        self.asked.set()
        task = self._running[rid] = asyncio.ensure_future(self._said(input_ids, sampling_params))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            self.cancelled.append(rid)
            task.cancel()
            raise
        finally:
            del self._running[rid]
            self.ended.set()
        if task.cancelled():
            return self.result([], "abort")
        ids = [*self.tokenizer.encode(task.result()), END]
        most = sampling_params["max_new_tokens"]
        result = self.result(ids[:most], "stop" if len(ids) <= most else "length")
        if not self.experts:
            return result
        places = np.arange(experts_start, len(input_ids) + len(result.output_ids) - 1, dtype=np.int16)
        experts = np.stack([places, np.full_like(places, number)], axis=-1)[:, None]
        return replace(result, experts=experts, experts_start=experts_start)

    def result(self, ids: Sequence[int], reason: str) -> GenerateResult:
        return GenerateResult(
            output_ids=list(ids),
            text=self.tokenizer.decode(ids),
            log_probs=[LOG_PROB] * len(ids),
            finish_reason=reason,
            spans=[VersionSpan(self.version, 0, len(ids))] if ids else [],
            matched=END if reason == "stop" else None,
        )

    async def abort(self, rids: Sequence[str]) -> None:
        for rid in rids:
            if rid in self._running:
                self.aborted.append(rid)
                self._running[rid].cancel()

    async def row_seeds(self) -> RowSeeds:
        return RowSeeds.OWN

    @property
    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(ids) for _, ids, _ in self.calls]

    @property
    def seeds(self) -> dict[str, int]:
        """The seed of each request, by the text of its prompt."""
        return {self.tokenizer.decode(ids): params["sampling_seed"] for _, ids, params in self.calls}

    async def _said(self, input_ids: Sequence[int], params: dict[str, Any]) -> str:
        answer = self.say(self.tokenizer.decode(input_ids), params)
        return str(await answer) if asyncio.iscoroutine(answer) or isinstance(answer, asyncio.Future) else str(answer)


def user(text: str) -> list[dict[str, Any]]:
    """One message of a user."""
    return [{"role": "user", "content": text}]


def make_args(**options: Any) -> Any:
    """Options with an agent, and everything else at its default but ``options``."""
    named = (
        {} if {"tools_path", "agent_command"} & set(options) else {"agent_path": "harness.agent_play:agent_of_options"}
    )
    return compose(CORE_SECTIONS)(**{**named, **options})


def make_groups(num_groups: int, num_samples: int, first: int = 0) -> list[SampleGroup]:
    groups = []
    for row in range(first, first + num_groups):
        uid = GroupUid("source", row, 0)
        samples = [Sample(uid=uid, sample_index=i, prompt=user(f"p{row}")) for i in range(num_samples)]
        groups.append(SampleGroup(uid=uid, samples=samples, incarnation="inc"))
    return groups


def make_ticket(num_groups: int, evaluation: bool = False) -> Ticket:
    return Ticket(
        rollout_id=0, evaluation=evaluation, num_groups=num_groups, version=3, incarnation="inc", max_staleness=0
    )


@asynccontextmanager
async def context_of(
    engine: AgentEngine,
    agent: Any = None,
    *,
    run_dir: Path | None = None,
    start: RunStart | None = None,
    **options: Any,
) -> AsyncIterator[RolloutContext]:
    """A rollout worker's context, in which ``agent`` plays. run_dir, start: those of a run."""
    own: Any = {"engine": engine, "tokenizer": engine.tokenizer, "run_dir": run_dir, "start": start}
    context = RolloutContext.build(make_args(**options), registry=PluginRegistry(), **own)
    if agent is not None:
        context.agent = agent
    try:
        yield context
    finally:
        await context.aclose()


@asynccontextmanager
async def session_of(
    engine: AgentEngine,
    *,
    row: int = 0,
    index: int = 0,
    play: int = 0,
    requests: Requests | None = None,
    **options: Any,
) -> AsyncIterator[Session]:
    """A session of sample ``index`` of row ``row``."""
    async with context_of(engine, **options) as context:
        (group,) = make_groups(1, index + 1, first=row)
        buffer = FakeBuffer([group], make_ticket(1))
        lease = Lease.of(context, buffer, group, requests or Requests())
        params = sampling_params_for(context.args, evaluation=False)
        yield Session(lease, group[index], params, Play(number=play))


@asynccontextmanager
async def client_over(engine: AgentEngine, **options: Any) -> AsyncIterator[tuple[Session, Any]]:
    """A session behind a gateway, and OpenAI's client of it."""
    async with session_of(engine, **options) as session:
        gateway = Gateway(engine.tokenizer)
        try:
            async with gateway.opened(session) as (url, key):
                strict = openai.AsyncOpenAI(base_url=url, api_key=key, _strict_response_validation=True, timeout=120)
                async with strict:
                    yield session, strict
        finally:
            await gateway.aclose()


async def roll(
    agent: Any,
    engine: AgentEngine,
    *,
    num_groups: int = 1,
    num_samples: int = 2,
    more_groups: int = 1,
    evaluation: bool = False,
    metadata: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[FakeBuffer, dict[str, float]]:
    """One rollout of ``num_groups`` groups that ``agent`` plays, and its metrics. Rewards of 1, if not by the agent."""
    options = {"custom_rm_path": "harness.agent_play:one", "rollout_batch_size": num_groups, **options}
    async with context_of(engine, agent, **options) as context:
        groups = make_groups(num_groups + (0 if evaluation else more_groups), num_samples)
        for sample in (each for group in groups for each in group.samples):
            sample.metadata |= metadata or {}
        fake = FakeBuffer(groups, make_ticket(num_groups, evaluation))
        buffer = client_of(fake, context)
        with context.active(buffer):
            output = await DefaultRollout(context.args)(context.args, 0, buffer, evaluation)
    return fake, dict(output.metrics)


async def one(args: Any, sample: Sample) -> float:
    """A reward of 1 for all that can be scored."""
    return 1.0


@asynccontextmanager
async def anthropic_over(engine: AgentEngine, **options: Any) -> AsyncIterator[tuple[Session, Any]]:
    """A session behind a gateway, and Anthropic's client of it."""
    async with client_over(engine, **options) as (session, client):
        root = str(client.base_url).removesuffix("v1/")
        strict = anthropic.AsyncAnthropic(
            base_url=root, api_key=client.api_key, _strict_response_validation=True, timeout=120
        )
        async with strict:
            yield session, strict
