"""Conversations of agents with a real server: each sampled token is trained once, and has the model's probability."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.agents.turns import rows
from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import EngineClient
from buffer_rl.options.section import compose
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl_sglang.launcher import launch
from buffer_rl_sglang.options import SglangOptions
from harness.agent_play import chat_tokenizer, context_of
from harness.agent_talk import Noting, converse, trained

from .conftest import TIMEOUT_S

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TIMEOUT_S)]
CONVERSATIONS, AT_ONCE = 50, 8


async def test_each_sampled_token_of_fifty_conversations_is_trained_once_with_its_probability(
    sglang_python: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "hf", max_position_embeddings=1024)
    args: Any = compose([*CORE_SECTIONS, SglangOptions])(
        hf_checkpoint=folder,
        engine_device="cpu",
        engine_context_length=512,
        engine_max_running_requests=AT_ONCE,
        sglang_python=sglang_python,
    )
    server = launch(args, 0, str(tmp_path / "server.log"))
    try:
        server.wait_ready(300)
        async with EngineClient(server.url, [server.url]) as client:
            noting: Any = Noting(client)
            noting.tokenizer = chat_tokenizer()
            async with context_of(noting, rollout_max_response_len=6) as context:
                sessions = await converse(context, CONVERSATIONS, AT_ONCE)
    finally:
        server.stop()
    made = [row for session in sessions for row in rows(each.turn for each in session.exchanges)]
    assert sum((trained(row.tokens, row.loss_mask) for row in made), Counter()) == noting.sampled
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row in made:
        scores = scores_of(model, row.tokens)[-row.response_length :]
        for mask, recorded, score in zip(row.loss_mask, row.rollout_log_probs, scores, strict=True):
            assert not mask or abs(recorded - score) < 1e-4


@torch.no_grad()
def scores_of(model: Any, tokens: list[int]) -> list[float]:
    """The log-probability of each token but the first one."""
    table = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1)
    return [float(table[place, token]) for place, token in enumerate(tokens[1:])]
