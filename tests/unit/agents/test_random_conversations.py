"""Conversations that agents might have, with the embedded engine in this process: branches, edits, repetitions,
parallel calls, sub-agents. Each sampled token is trained once, behind the ids that the engine saw."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.agents.turns import rows
from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.sampling import LogProbDetails, SamplingParams
from buffer_rl.embedded.scheduler import Request, Scheduler
from buffer_rl.engines.client import GenerateResult
from buffer_rl.records.groups import VersionSpan
from buffer_rl.testing.tiny import make_tiny_model
from harness.agent_play import TEMPLATE, AgentEngine, chat_tokenizer, context_of
from harness.agent_talk import Noting, converse, trained
from harness.chat_tokenizer import byte_tokenizer

AT_ONCE = 16
MOST_TOKENS = 6


def pieces_tokenizer() -> Any:
    """Bytes, and words that a model may also write in pieces, which the tokenizer would not choose."""
    words = ["ab", "12", "1a2b", "user", " b"]
    return byte_tokenizer(TEMPLATE, special=["<eos>"], merges=words, eos_token="<eos>")


@dataclass
class Embedded(AgentEngine):
    """The embedded engine's scheduler."""

    scheduler: Any = None
    waiting: dict[str, asyncio.Future[Request]] = field(default_factory=dict)

    async def agenerate(
        self, rid: str, input_ids: Sequence[int], sampling_params: dict[str, Any], **_: Any
    ) -> GenerateResult:
        params = SamplingParams(
            max_new_tokens=sampling_params["max_new_tokens"],
            stop_token_ids=frozenset({self.tokenizer.eos_token_id}),
            temperature=1.0,
        )
        request = Request(rid=rid, prompt_ids=tuple(input_ids), params=params, seed=sampling_params["sampling_seed"])
        answer = self.waiting[rid] = asyncio.get_running_loop().create_future()
        self.scheduler.add(request)
        await answer
        reason = (request.finish_reason or {})["type"]
        return GenerateResult(
            output_ids=list(request.output_ids),
            text="",
            log_probs=list(request.log_probs),
            finish_reason=reason,
            spans=[VersionSpan(3, 0, len(request.output_ids))],
            matched=request.output_ids[-1] if reason == "stop" else None,
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


@pytest.mark.parametrize(
    ("number", "history", "make_tokenizer"),
    [
        (30, "template", chat_tokenizer),
        (30, "append", pieces_tokenizer),
        (30, "template", pieces_tokenizer),
        pytest.param(300, "template", pieces_tokenizer, marks=pytest.mark.slow),
    ],
)
async def test_each_sampled_token_of_random_conversations_is_trained_once_behind_the_ids_that_the_engine_saw(
    tmp_path: Path, number: int, history: str, make_tokenizer: Callable[[], Any]
) -> None:
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    folder = make_tiny_model(tmp_path, vocab=len(tokenizer) + 2, characters="")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = FastDecoder(model, 512, deterministic=False)
    engine = Embedded(scheduler=Scheduler(decoder, max_running_requests=AT_ONCE), tokenizer=tokenizer)
    noting: Any = Noting(engine)
    async with context_of(noting, rollout_max_response_len=MOST_TOKENS, agent_history=history) as context:
        work = asyncio.ensure_future(engine.work())
        sessions = await converse(context, number, AT_ONCE)
        work.cancel()
    made = [row for session in sessions for row in rows(each.turn for each in session.exchanges)]
    total = sum((trained(row.tokens, row.loss_mask) for row in made), Counter())
    assert total == noting.sampled
    assert total.total() > 8 * number
    assert sum((session.causes for session in sessions), Counter()).keys() >= {"new", "extends", "changed"}
    for session in sessions:
        recorded_ids = {(*each.turn.prompt_ids, *each.turn.output_ids) for each in session.exchanges} | {()}
        for prompt in (each.prompt for each in session.exchanges if each.prompt is not None):
            assert prompt.ids[: prompt.num_held] in recorded_ids  # never encoded anew
    for row in made:
        scores = engine.scores(row.tokens, len(row.tokens) - row.response_length)
        for mask, recorded, score in zip(row.loss_mask, row.rollout_log_probs, scores, strict=True):
            assert not mask or abs(recorded - score) < 1e-4
