"""The tokens that truncated sampling kept, from a real engine behind the real router to the trainer's forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.embedded.launcher import launch
from buffer_rl.engines.client import EngineClient, GenerateResult, parse_answer
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.errors import EngineError
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from buffer_rl.trainer.collate import collate, split_rows
from buffer_rl.trainer.forward import response_log_probs
from buffer_rl.trainer.pretrained import load_model

PROMPT = [5, 6, 7, 8]
CUTS: list[dict[str, Any]] = [
    {"top_p": 0.6},
    {"top_k": 4, "temperature": 0.7},
    {"min_p": 0.3, "top_p": 0.9},
    {"temperature": 1.0},
]


@pytest.fixture(scope="module")
def fleet(engine_args: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    args = engine_args(replay_kept_tokens=True)
    with EngineFleet(args, str(tmp_path_factory.mktemp("run")), launch) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def answers(fleet: EngineFleet) -> list[GenerateResult]:
    async def ask() -> list[GenerateResult]:
        async with EngineClient(fleet.router_url, fleet.engine_urls) as client:
            more = {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 3}
            return [await client.agenerate(f"r{i}", PROMPT, {**cut, **more}) for i, cut in enumerate(CUTS)]

    return asyncio.run(ask())


def gaps(model: Any, answer: GenerateResult, temperature: float, *, replayed: bool) -> np.ndarray:
    assert answer.kept is not None
    kept = {
        "kept_counts": [np.array([len(ids) // 4 for ids in answer.kept], dtype=np.int32)],
        "kept_tokens": [np.frombuffer(b"".join(answer.kept), dtype=np.int32)],
    }
    batch = TrainBatch(
        rollout_id=0,
        task="train_0",
        row_ids=[RowId(GroupUid("data", 0, 0), 0)],
        columns={
            "tokens": [np.array(PROMPT + answer.output_ids, dtype=np.int32)],
            "response_length": np.array([len(answer.output_ids)], dtype=np.int32),
            **(kept if replayed else {}),
        },
    )
    micro = collate(batch, torch.device("cpu"))
    (ours,) = split_rows(response_log_probs(model, micro, temperature)[0], micro.response_lengths)
    return np.abs(ours - np.array(answer.log_probs))


def test_engine_and_trainer_agree_where_the_kept_tokens_are_replayed_and_not_without(
    answers: list[GenerateResult], model_folder: Callable[..., str]
) -> None:
    model = load_model(model_folder("qwen3"), torch.device("cpu"), "--hf-checkpoint")
    for cut, answer in zip(CUTS, answers, strict=True):
        temperature = cut.get("temperature", 1.0)
        assert gaps(model, answer, temperature, replayed=True).max() < 2e-5
        without = gaps(model, answer, temperature, replayed=False)
        assert without.max() < 2e-5 if cut == {"temperature": 1.0} else without.mean() > 0.2


def test_each_token_is_among_those_that_were_kept_for_it(answers: list[GenerateResult]) -> None:
    for cut, answer in zip(CUTS, answers, strict=True):
        assert answer.kept is not None
        sets = [np.frombuffer(ids, dtype=np.int32).tolist() for ids in answer.kept]
        assert len(sets) == 40
        if "top_k" in cut:
            assert {len(ids) for ids in sets} == {4}
        if cut == {"temperature": 1.0}:
            assert sets == [[]] * 40
        else:
            assert all(token in ids for token, ids in zip(answer.output_ids, sets, strict=True))


def test_an_answer_need_not_have_them_but_ids_without_offsets_break_the_protocol() -> None:
    answer: dict[str, Any] = {
        "output_ids": [5],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-1.0, 5, None]],
            "weight_versions": [{"version": "0", "start": 0, "end": 1}],
        },
    }
    assert parse_answer(answer, "http://x").kept is None
    answer["meta_info"]["top_p_token_ids"] = "BQAAAAYAAAA="  # 5 and 6, little-endian
    answer["meta_info"]["top_p_token_offsets"] = "AAAAAAIAAAA="  # 0 and 2
    assert parse_answer(answer, "http://x").kept == [b"\5\0\0\0\6\0\0\0"]
    del answer["meta_info"]["top_p_token_offsets"]
    with pytest.raises(EngineError, match="breaks the protocol"):
        parse_answer(answer, "http://x")
