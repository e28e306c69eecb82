"""The experts that computed each token in the embedded engine: those that transformers' routers choose, and what they
do for the trainer's log-probabilities."""

from __future__ import annotations

import binascii
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.embedded.fallback import FallbackDecoder
from buffer_rl.embedded.loader import LoadedModel, LoadOptions
from buffer_rl.embedded.protocol import Limits, answers, parse_generate
from buffer_rl.embedded.routers import find_routers, recorded_experts
from buffer_rl.embedded.scheduler import Request, Scheduler
from buffer_rl.engines.client import parse_answer
from buffer_rl.engines.protocol import BadRequestError
from buffer_rl.engines.text import TextCodec
from buffer_rl.errors import EngineError
from buffer_rl.records.experts import ExpertSizes
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.collate import split_rows
from buffer_rl.trainer.forward import passes, replayed, response_log_probs
from buffer_rl.trainer.pretrained import load_model
from buffer_rl.trainer.routing_replay import RoutingReplay

SIZES = ExpertSizes(num_experts=8, top_k=2, layers=(0, 1, 2, 3), num_layers=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("mixture")
    return make_tiny_model(where, "qwen3_moe", init_scale=0.3, num_hidden_layers=4, num_experts=8)


@pytest.fixture(scope="module")
def mixture(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def scheduler_of(module: Any, **how: Any) -> Scheduler:
    decoder = FallbackDecoder(module, 512, check=False, returns_experts=True, **how)
    return Scheduler(decoder, max_running_requests=16)


def experts_of(request: Request) -> np.ndarray:
    assert request.row.experts is not None
    return np.concatenate(request.row.experts)


@torch.no_grad()
def whole_pass(module: Any, tokens: tuple[int, ...]) -> np.ndarray:
    """What the routers choose in one pass over all tokens but the last, ``[num_tokens - 1, layers, top_k]``."""
    with recorded_experts(module, find_routers(module)) as chosen:
        module(input_ids=torch.tensor([tokens[:-1]]))
    return torch.stack(chosen, 1).numpy()


def same_sets(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and np.array_equal(np.sort(left, -1), np.sort(right, -1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_they_are_those_of_a_whole_pass_whoever_shares_the_batch(
    deterministic: bool, mixture: Any, make_request: Any, random_prompt: Any, run: Any
) -> None:
    scheduler, rng = scheduler_of(mixture, deterministic=deterministic), random.Random(1)
    shared = random_prompt(rng, 7)
    for number, prompt in enumerate([shared, random_prompt(rng, 60), shared, random_prompt(rng, 1)]):
        scheduler.add(make_request(str(number), prompt, seed=number, max_new_tokens=8 + number))  # one leaves its slots
    finished = run(scheduler)
    scheduler.add(make_request("cached", shared, seed=9, max_new_tokens=4))
    finished += run(scheduler)
    assert finished[-1].cached_tokens == 7
    assert len(finished) == 5
    for request in finished:
        found = experts_of(request)
        assert found.dtype == np.uint8
        assert same_sets(found, whole_pass(mixture, request.sequence)), request.rid


def test_a_retracted_request_has_those_of_the_newest_weights_and_an_aborted_one_those_it_had(
    mixture: Any, folder: str, make_request: Any, random_prompt: Any, run: Any, tmp_path: Path
) -> None:
    scheduler, rng = scheduler_of(mixture), random.Random(2)
    scheduler.add(make_request("goes on", random_prompt(rng, 9), max_new_tokens=12))
    scheduler.add(make_request("ends", random_prompt(rng, 5), seed=1, max_new_tokens=12))
    for _ in range(4):
        scheduler.step()
    other_folder = make_tiny_model(tmp_path, "qwen3_moe", seed=5, init_scale=0.3, num_hidden_layers=4, num_experts=8)
    other = AutoModelForCausalLM.from_pretrained(other_folder, dtype=torch.float32).eval()
    scheduler.pause("retract")
    (ended,) = scheduler.abort(lambda request: request.rid == "ends")
    assert same_sets(experts_of(ended), whole_pass(mixture, ended.sequence))
    decoder: Any = scheduler.decoder
    decoder.load(other)
    scheduler.weights_changed("1")
    scheduler.resume()
    (went_on,) = run(scheduler)
    assert [span["version"] for span in went_on.version_spans()] == ["0", "1"]
    assert same_sets(experts_of(went_on), whole_pass(other, went_on.sequence))
    assert not same_sets(experts_of(went_on), whole_pass(mixture, went_on.sequence))


def test_running_requests_that_are_paused_in_place_keep_the_experts_of_their_entries(
    mixture: Any, make_request: Any, random_prompt: Any, run: Any, tmp_path: Path
) -> None:
    scheduler = scheduler_of(mixture)
    request = make_request("r", random_prompt(random.Random(3), 9), max_new_tokens=10)
    scheduler.add(request)
    for _ in range(4):
        scheduler.step()
    before = experts_of(request)
    scheduler.pause("in_place")
    other_folder = make_tiny_model(tmp_path, "qwen3_moe", seed=5, init_scale=0.3, num_hidden_layers=4, num_experts=8)
    decoder: Any = scheduler.decoder
    decoder.load(AutoModelForCausalLM.from_pretrained(other_folder, dtype=torch.float32).eval())
    scheduler.weights_changed("1")
    scheduler.resume()
    run(scheduler)
    assert len(before) == 9 + 4
    assert np.array_equal(experts_of(request)[: len(before)], before)
    assert len(experts_of(request)) == 9 + 10 - 1


LIMITS = Limits(
    vocab_size=98,
    context_length=64,
    deterministic=True,
    has_tokenizer=False,
    longest_prompt=63,
    longest_sequence=64,
    padded_vocab=98,
    returns_experts=True,
)


def answered(scheduler: Scheduler, run: Any, body: dict[str, Any], limits: Limits = LIMITS) -> list[dict[str, Any]]:
    call = parse_generate(body, TextCodec(None), limits)
    for request in call.requests:
        scheduler.add(request)
    run(scheduler)
    return answers(call, TextCodec(None), "0", return_kept=False)


def test_answers_have_them_from_the_token_that_was_asked_for_and_the_client_reads_them(mixture: Any, run: Any) -> None:
    prompt, params = [5, 6, 7, 8], {"max_new_tokens": 5, "ignore_eos": True, "sampling_seed": 3}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    (whole,) = answered(scheduler_of(mixture), run, body)
    expected = whole_pass(mixture, (*prompt, *whole["output_ids"]))
    read = parse_answer(whole, "url", experts=SIZES, num_prompt_tokens=4)
    assert read.experts is not None
    assert same_sets(read.experts, expected)
    assert read.experts.dtype == np.uint8
    assert parse_answer(whole, "url").experts is None
    asking = {"return_routed_experts": True, "routed_experts_start_len": 3}
    (part,) = answered(scheduler_of(mixture), run, body | asking)
    read = parse_answer(part, "url", experts=SIZES, num_prompt_tokens=4, experts_start=3)
    assert read.experts_start == 3
    assert same_sets(np.asarray(read.experts), expected[3:])
    # A router that drops what was asked: all come, and the answer says so.
    read = parse_answer(whole, "url", experts=SIZES, num_prompt_tokens=4, experts_start=3)
    assert (read.experts_start, len(np.asarray(read.experts))) == (0, 8)


@pytest.mark.parametrize("start", [5, -1, 1.0, "0", True, [0]])
def test_a_start_that_is_no_token_of_the_prompt_is_refused(start: Any) -> None:
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 2}, "routed_experts_start_len": start}
    with pytest.raises(BadRequestError, match=r"'routed_experts_start_len' must be in \[0, 4\]"):
        parse_generate(body, TextCodec(None), LIMITS)


def encoded(rows: Any) -> str:
    return binascii.b2a_base64(np.asarray(rows, dtype="<i4").tobytes(), newline=False).decode()


def meta_with(experts: Any) -> dict[str, Any]:
    pairs = [[-0.5, 6, None], [-0.5, 7, None]]
    spans = [{"version": "0", "start": 0, "end": 2}]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": pairs, "weight_versions": spans}
    return {"output_ids": [6, 7], "meta_info": meta | {"routed_experts": experts}}


def test_a_server_may_send_dense_layers_too_which_are_left_out() -> None:
    sizes = ExpertSizes.of(
        {"num_experts": 300, "num_experts_per_tok": 2, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    )
    assert sizes == ExpertSizes(num_experts=300, top_k=2, layers=(0, 2), num_layers=3)
    rows = np.arange(2 * 3 * 2).reshape(2, 3, 2)
    rows[:, 1] = -1  # two rows, of a prompt of one token and an answer of two
    found = parse_answer(meta_with(encoded(rows)), "url", experts=sizes, num_prompt_tokens=1).experts
    assert found is not None
    assert found.tolist() == rows[:, [0, 2]].tolist()
    assert found.dtype == np.int16
    found = parse_answer(meta_with(encoded(rows[:, [0, 2]])), "url", experts=sizes, num_prompt_tokens=1).experts
    assert found is not None
    assert found.tolist() == rows[:, [0, 2]].tolist()


@pytest.mark.parametrize(
    "sent",
    [encoded([[[0, 1]] * 4]), encoded([[[0, 8]] * 4] * 2), encoded([[[0, -1]] * 4] * 2), "####", 7, encoded([])],
    ids=["of one token", "expert 8 of 8", "expert -1", "no base64", "no text", "empty"],
)
def test_experts_that_are_none_break_the_protocol(sent: Any) -> None:
    with pytest.raises(EngineError, match="breaks the protocol"):
        parse_answer(meta_with(sent), "url", experts=SIZES, num_prompt_tokens=1)
    assert parse_answer(meta_with(None), "url", experts=SIZES, num_prompt_tokens=1).experts is None


def test_a_model_without_experts_is_refused_when_it_is_loaded(model_folder: Callable[..., str]) -> None:
    with pytest.raises(EngineError, match="no mixture of experts"):
        LoadedModel(LoadOptions(model_path=model_folder("qwen3"), returns_experts=True))


def gap_and_share(module: Any, trained: Any, run: Any, make_request: Any, random_prompt: Any) -> dict[str, float]:
    """Mean ``|engine - trainer|`` in nats over sampled tokens, plain and replayed; and the share of tokens and layers
    whose own experts are others."""
    scheduler, rng = scheduler_of(module), random.Random(4)
    for number in range(12):
        prompt = random_prompt(rng, rng.randrange(4, 12))
        for sample in range(4):
            scheduler.add(make_request(f"{number}-{sample}", prompt, seed=10 * number + sample, max_new_tokens=24))
    finished = run(scheduler)
    columns = {
        "tokens": [np.array(request.sequence, dtype=np.int32) for request in finished],
        "response_length": np.full(len(finished), 24, dtype=np.int32),
        "routed_experts": [experts_of(request) for request in finished],
    }
    row_ids = [RowId(GroupUid("set", number, 0), 0) for number in range(len(finished))]
    batch = TrainBatch(rollout_id=0, task="train_0", row_ids=row_ids, columns=columns)
    args: Any = SimpleNamespace(replay_routed_experts=True, max_tokens_per_gpu=4096, deterministic=False)
    objective: Any = SimpleNamespace(unit="row", critic=False)
    replay = RoutingReplay.of(args, trained)
    found = {}
    for name, how in (("plain", None), ("replayed", replay)):
        gaps = []
        for rows, micro in passes(args, trained, batch, torch.device("cpu"), objective, replay=how):
            with torch.no_grad(), replayed(how, trained, micro) as differing:
                log_probs = split_rows(response_log_probs(trained, micro, 1.0)[0], micro.response_lengths)
            gaps += [np.abs(own - finished[row].log_probs) for row, own in zip(rows, log_probs, strict=True)]
            if differing is not None:
                found["differing"] = float(differing.num_other / differing.num_given)
        found[name] = float(np.concatenate(gaps).mean())
    return found


def test_replay_closes_the_gap_to_an_engine_in_bfloat16_and_does_nothing_to_one_in_float32(
    folder: str, mixture: Any, run: Any, make_request: Any, random_prompt: Any
) -> None:
    trained = load_model(folder, torch.device("cpu"), "--hf-checkpoint")
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    exact = gap_and_share(mixture, trained, run, make_request, random_prompt)
    coarse = gap_and_share(half, trained, run, make_request, random_prompt)
    print(exact, coarse)
    assert exact["differing"] == 0
    assert exact["plain"] < 1e-5
    assert exact["replayed"] == pytest.approx(exact["plain"], abs=1e-6)
    assert 0.005 < coarse["differing"] < 0.2
    assert coarse["replayed"] < 0.7 * coarse["plain"]
