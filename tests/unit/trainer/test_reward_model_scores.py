"""The reward model's scores, alone and in batches, against those of transformers; calls that wait are answered
together."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, pipeline

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose, dump_args
from buffer_rl.testing.tiny import ARCHITECTURES, make_char_tokenizer, make_tiny_model
from buffer_rl.trainer.reward_model import RewardModel, RewardModelWorker

KIND = {"auto_class": "AutoModelForSequenceClassification", "num_labels": 1}
CPU = torch.device("cpu")
PAD, EOS = 0, 1


def make_bert(folder: Path) -> str:
    """A classifier that reads the first token, and attends in both directions."""
    config = BertConfig(
        vocab_size=len(make_char_tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=PAD,
        num_labels=1,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    make_char_tokenizer().save_pretrained(folder)
    return str(folder)


def make(kind: str, folder: Path, **changes: Any) -> str:
    return make_bert(folder) if kind == "bert" else make_tiny_model(folder, kind, **KIND, **changes)


def rows_of(lengths: list[int]) -> list[np.ndarray]:
    """Random token ids, each row with the end token last."""
    random = np.random.default_rng(0)
    return [np.append(random.integers(3, 90, size=length - 1), EOS).astype(np.int32) for length in lengths]


def by_transformers(folder: str, row: np.ndarray) -> float:
    """The logit of one row without padding and mask."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.from_numpy(row.astype(np.int64))[None]).logits[0, 0])


@pytest.mark.parametrize("kind", [*ARCHITECTURES, "bert"])
def test_a_score_is_that_of_transformers_alone_and_in_every_batch(kind: str, tmp_path: Path) -> None:
    folder = make(kind, tmp_path)
    rows = rows_of([5, 1, 17, 9, 30, 2])
    expected = [by_transformers(folder, row) for row in rows]
    assert max(expected) - min(expected) > 0.01
    model = RewardModel(folder, CPU)
    for max_tokens in (1, 40, 10_000):
        assert model.scores(rows, max_tokens) == pytest.approx(expected, abs=1e-5)
    assert [model.scores([row], 64)[0] for row in rows] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pad", [EOS, None], ids=["padding is the end token", "no padding token"])
def test_responses_with_an_end_token_have_the_score_of_transformers_whatever_pads_them(
    pad: int | None, tmp_path: Path
) -> None:
    folder = make("qwen3", tmp_path, pad_token_id=pad)
    rows = rows_of([5, 12, 3])
    expected = [by_transformers(folder, row) for row in rows]
    assert RewardModel(folder, CPU).scores(rows, 1000) == pytest.approx(expected, abs=1e-5)


def test_scores_are_those_of_the_pipeline_of_transformers(tmp_path: Path) -> None:
    folder = make("qwen3", tmp_path)
    texts = ["2+2=4", "why=because it is so", "?"]
    classify: Any = pipeline("text-classification", folder, function_to_apply="none")
    expected = [answer["score"] for answer in classify(texts)]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = [np.array(tokenizer(text)["input_ids"], dtype=np.int32) for text in texts]
    assert RewardModel(folder, CPU).scores(rows, 1000) == pytest.approx(expected, abs=1e-5)


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, num_labels=1)
    with pytest.raises(ConfigError, match=r"lacks 1 weights of its architecture, such as score\.weight"):
        RewardModel(folder, CPU)


def worker_of(folder: str, **changes: Any) -> RewardModelWorker:
    options = {"rm_model": folder, "train_device": "cpu", "logger": [], **changes}
    return RewardModelWorker(dump_args(compose(CORE_SECTIONS)(**options)))


def batches_of(worker: RewardModelWorker, calls: list[list[np.ndarray]]) -> tuple[list[list[int]], list[list[float]]]:
    """Has the worker answer ``calls``, all but the first of which come while the first is computed. Returns the lengths
    of the rows that were computed together, and the answers."""
    batches: list[list[int]] = []
    compute, started, go_on = worker._scores, threading.Event(), threading.Event()

    def scores(rows: Any) -> list[float]:
        batches.append([len(row) for row in rows])
        started.set()
        assert go_on.wait(20)
        return compute(rows)

    worker._scores = scores  # type: ignore[method-assign]

    async def run() -> list[list[float]]:
        first = asyncio.create_task(worker.score(calls[0]))
        await asyncio.to_thread(started.wait, 20)
        others = [asyncio.create_task(worker.score(call)) for call in calls[1:]]
        await asyncio.sleep(0)  # each has put its rows where they wait
        go_on.set()
        return list(await asyncio.gather(first, *others))

    return batches, asyncio.run(run())


def test_calls_that_wait_share_a_forward_pass_up_to_the_token_budget(tmp_path: Path) -> None:
    folder = make("qwen3", tmp_path)
    calls = [rows_of(lengths) for lengths in ([3], [4, 4], [4], [8, 2], [40])]
    worker = worker_of(folder, max_tokens_per_gpu=12)
    batches, answers = batches_of(worker, calls)
    assert batches == [[3], [4, 4, 4], [8, 2], [40]]  # 3 x 4 tokens, 2 x 8, and a row that is alone too long
    model = RewardModel(folder, CPU)
    for call, answer in zip(calls, answers, strict=True):
        assert answer == pytest.approx([model.scores([row], 1)[0] for row in call], abs=1e-5)


def test_under_deterministic_a_call_has_the_same_bits_whatever_waits_beside_it(tmp_path: Path) -> None:
    folder = make("qwen3", tmp_path)
    calls = [rows_of(lengths) for lengths in ([3, 5], [4, 4], [9, 4])]
    try:
        batches, together = batches_of(worker_of(folder, deterministic=True), calls)
        assert batches == [[3, 5], [4, 4], [9, 4]]
        alone = [batches_of(worker_of(folder, deterministic=True), [call])[1][0] for call in calls]
    finally:
        torch.use_deterministic_algorithms(False)
    assert together == alone


def test_a_forward_pass_that_fails_fails_its_calls_and_no_others(tmp_path: Path) -> None:
    worker = worker_of(make("qwen3", tmp_path))

    async def run() -> tuple[BaseException, list[float]]:
        with pytest.raises(IndexError) as caught:
            await worker.score([np.array([10_000], dtype=np.int32)])
        return caught.value, await worker.score(rows_of([4]))

    error, scores = asyncio.run(run())
    assert "index out of range" in str(error)
    assert len(scores) == 1
