"""Models that are split over ranks, beside the same model on one rank; tests/unit/examples/test_trainer_backends.py has
more of two ranks."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import TrainBatch
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.options import check_model_options
from buffer_rl.trainer.sharding import fsdp_modules, layers_of
from harness.backend_ranks import groups_of, largest_difference, run_ranks
from harness.recorded_rows import recorded_rows
from harness.trainers import LARGE_EPS, accumulate, make_trainer

Steps = list[list[list[TrainBatch]]]
FORKED = pytest.mark.usefixtures("forked_processes")


def options(model: str, **changes: Any) -> Any:
    """Small micro-batches, so that ranks need different numbers of passes."""
    given = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.05, "max_tokens_per_gpu": 60, "entropy_coef": 0.01}
    return compose(CORE_SECTIONS)(
        hf_checkpoint=model, train_device="cpu", use_kl_loss=True, kl_loss_coef=0.1, **LARGE_EPS, **given, **changes
    )


def dealt(num_steps: int, *deals: list[tuple[int, ...]]) -> Steps:
    """Steps of five groups. Of each deal the numbers of each rank's groups."""
    return [
        [[groups_of(recorded_rows(number, 5), *ranks) for ranks in deal] for deal in deals]
        for number in range(num_steps)
    ]


WHOLE = [(0, 1, 2, 3, 4)]
TWO_DEALS = [(0, 1, 2)], [(3, 4)]
TWO = [(0, 1), (2, 3)], [(4,), ()]
FOUR = [(0,), (2,), (1,), ()], [(4,), (), (3,), ()]


def trained(folder: Path, job: list[Any], world_size: int) -> list[list[dict[str, Any]]]:
    """For each item of the job what each rank found."""
    folder.mkdir(exist_ok=True)
    file = folder / "job"
    file.write_bytes(pickle.dumps(job))
    return [list(ranks) for ranks in zip(*run_ranks(world_size, file), strict=True)]


STEPS = 2
EVEN, EMPTY, ONE, TWICE, KEPT, AGAIN = "no empty share", "an empty share", "one deal", "two deals", "kept", "recomputed"
UNEVEN = "qwen2 of 9 tokens"
"""Tied embeddings that no number of ranks divides."""
MOST_RANKS = int(os.environ.get("TEST_MOST_RANKS", "4"))
"""On other processors, kernels differ, and the number of ranks need not."""
ALL_CASES = [
    # architecture (qwen2 and qwen3 are tied), ranks, of a copy; pairs of all values are among them
    ("qwen2", 2, 2, EVEN, ONE, KEPT),
    ("qwen2", 4, 4, EMPTY, ONE, AGAIN),
    ("qwen2", 4, 2, EVEN, TWICE, KEPT),
    ("qwen3", 2, 2, EMPTY, ONE, KEPT),
    ("qwen3", 4, 4, EVEN, TWICE, KEPT),
    ("qwen3", 4, 2, EMPTY, TWICE, AGAIN),
    ("llama", 2, 2, EVEN, TWICE, AGAIN),
    ("llama", 4, 4, EMPTY, TWICE, KEPT),
    ("llama", 4, 2, EMPTY, ONE, KEPT),
    ("qwen3_moe", 4, 2, EVEN, TWICE, AGAIN),
    (UNEVEN, 2, 2, EVEN, ONE, KEPT),
    (UNEVEN, 4, 4, EMPTY, ONE, AGAIN),
]
CASES = [case for case in ALL_CASES if case[1] <= MOST_RANKS]


def shares(num_steps: int, ranks: int, share: str, deals: str) -> Steps:
    """Of ten groups a step, in one deal or two: the first rank gets more, and perhaps the last one nothing."""
    given = ranks - (share == EMPTY)
    size = 10 if deals == ONE else 5
    owners = [min(number, given) % given for number in range(size)]
    parts = [
        [tuple(start + n for n in range(size) if owners[n] == rank) for rank in range(ranks)]
        for start in range(0, 10, size)
    ]
    return [
        [[groups_of(recorded_rows(number, 10), *groups) for groups in deal] for deal in parts]
        for number in range(num_steps)
    ]


@pytest.fixture(scope="module")
def trained_cases(forked_processes: None, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """By case what each rank found, and by architecture what one rank with the whole model found."""
    folder = tmp_path_factory.mktemp("cases")
    names = list(dict.fromkeys(case[0] for case in CASES))
    models: dict[str, str] = {}
    for name in names:
        vocab = 9 if name == UNEVEN else None
        models[name] = make_tiny_model(folder / name, name.split()[0], vocab, characters="abcd=", init_scale=0.2)
    # At this eps and learning rate, a difference d of gradients moves a weight by at most d.
    of = {name: options(models[name]).model_copy(update={"adam_eps": 1e-3, "lr": 1e-3}) for name in names}
    alone = trained(folder / "1", [("torch", of[name], shares(STEPS, 1, EVEN, ONE)) for name in names], 1)
    found: dict[Any, Any] = {name: rank for name, (rank,) in zip(names, alone, strict=True)}
    for ranks in sorted({case[1] for case in CASES}):
        cases = [case for case in CASES if case[1] == ranks]
        job: list[Any] = []
        for name, _, size, share, deals, recompute in cases:
            changes = {"fsdp_size": size, "recompute_granularity": "full" if recompute == AGAIN else None}
            job.append(("torch", of[name].model_copy(update=changes), shares(STEPS, ranks, share, deals)))
        found |= zip(cases, trained(folder / str(ranks), job, ranks), strict=True)
    return found


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative, over all weights together."""
    assert a.keys() == b.keys()
    apart, size = (
        sum(float(t.double().square().sum()) for t in each) for each in ([a[n] - b[n] for n in a], b.values())
    )
    return float((apart / size) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_split_ranks_have_the_gradient_of_one_in_each_step_and_its_weights_after_two(
    trained_cases: dict[Any, Any], case: Any
) -> None:
    alone, ranks = trained_cases[case[0]], trained_cases[case]
    for rank in ranks:
        for step, expected in zip(rank["steps"], alone["steps"], strict=True):
            assert distance(step["gradient"], expected["gradient"]) <= 1e-5
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert largest_difference(rank["weights"], alone["weights"]) <= 1e-5
        assert largest_difference(rank["resumed"], rank["weights"]) == 0


@FORKED
@pytest.mark.slow
def test_what_two_ranks_saved_is_continued_on_one_and_on_four_split_or_not(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", characters="abcd=", init_scale=0.3)
    split, plain = options(model, fsdp_size=-1), options(model)
    (ranks,) = trained(tmp_path / "2", [("torch", split, dealt(3, *TWO))], 2)
    saved, last = str(tmp_path / "2" / "job_2_0"), dealt(3, WHOLE)[-1:]
    ((alone,),) = trained(tmp_path / "1", [("torch", plain, last, saved)], 1)
    (four,) = trained(tmp_path / "4", [("torch", split, dealt(3, *FOUR)[-1:], saved)], 4)
    for rank in (alone, *four):
        assert largest_difference(rank["weights"], ranks[0]["weights"]) <= 1e-6
        assert rank["steps"][-1]["lr"] == ranks[0]["steps"][-1]["lr"]
    # And back: what one rank with the whole model saved.
    before = str(tmp_path / "1" / "job_1_0")
    (again,) = trained(tmp_path / "22", [("torch", split, dealt(3, *TWO)[-1:], before)], 2)
    ((once,),) = trained(tmp_path / "11", [("torch", plain, last, before)], 1)
    assert largest_difference(again[0]["weights"], once["weights"]) <= 1e-6


@FORKED
@pytest.mark.slow
def test_one_rank_that_is_split_has_the_bits_of_one_that_is_not_and_two_ranks_repeat_theirs(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", characters="abcd=", init_scale=0.3)
    steps = dealt(2, *TWO_DEALS)
    job = [("torch", options(model), steps), ("torch", options(model, fsdp_size=-1), steps)]
    (plain,), (split,) = trained(tmp_path / "1", job, 1)
    assert largest_difference(split["weights"], plain["weights"]) == 0
    twice = trained(tmp_path / "2", [("torch", options(model, fsdp_size=2), dealt(2, *TWO))] * 2, 2)
    assert largest_difference(twice[0][0]["weights"], twice[1][1]["weights"]) == 0


@FORKED
@pytest.mark.slow
def test_in_bfloat16_ranks_take_the_step_of_one_split_or_not(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", characters="abcd=", init_scale=0.3)
    half, exact = options(model, bf16=True), options(model, bf16=True, deterministic=True)
    jobs = [options(model), half, exact]
    (plain,), (alone,), (once,) = trained(tmp_path / "1", [("torch", args, dealt(2, *TWO_DEALS)) for args in jobs], 1)
    jobs = [half, half.model_copy(update={"fsdp_size": 2, "async_save": True}), exact]
    whole, split, twice = trained(tmp_path / "2", [("torch", args, dealt(2, *TWO)) for args in jobs], 2)
    for step, expected in zip(split[0]["steps"], plain["steps"], strict=True):
        assert 1e-4 < distance(step["gradient"], expected["gradient"]) < 0.1
    for rank in (alone, *split, *whole):
        for step, expected in zip(rank["steps"], plain["steps"], strict=True):
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
            assert step["grad_norm"] != expected["grad_norm"]
        assert largest_difference(rank["resumed"], rank["weights"]) == 0
        assert {tensor.dtype for tensor in rank["weights"].values()} == {torch.float32}
    assert largest_difference(whole[0]["weights"], whole[1]["weights"]) == 0
    assert largest_difference(twice[0]["weights"], once["weights"]) == 0


def test_layers_compute_in_bfloat16_and_what_is_trained_stays_float32(tmp_path: Path) -> None:
    trainer = make_trainer(options(make_tiny_model(tmp_path / "model", characters="abcd="), bf16=True))
    seen: list[torch.dtype] = []
    layer: Any = next(layers_of(trainer._actor))
    layer.self_attn.q_proj.register_forward_hook(
        lambda module, args, output: seen.extend([args[0].dtype, module.weight.dtype, output.dtype])
    )
    rows = recorded_rows(0, 3)
    rows.columns["ref_log_probs"] = trainer.log_probs("ref", rows)
    for ours, theirs in zip(trainer.log_probs("actor", rows), rows.columns["ref_log_probs"], strict=True):
        np.testing.assert_array_equal(ours, theirs)  # the first KL is 0
    accumulate(trainer, rows)
    gradients = [weight.grad for weight in trainer._actor.parameters() if weight.grad is not None]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    trainer.optimizer_step(1.0)
    assert set(seen) == {torch.bfloat16}
    kept = {**trainer._model.state(), **trainer._optimizer.state_tensors(), **dict(trainer._model.weights())}
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    frozen = trainer._frozen["ref"].module
    assert {weight.dtype for weight in frozen.parameters()} == {torch.bfloat16}
    torch.distributed.destroy_process_group()


def test_recomputed_layers_are_computed_twice_and_change_no_bit(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", characters="abcd=")
    found = []
    for granularity in None, "full":
        trainer = make_trainer(options(model, recompute_granularity=granularity))
        rows, calls = recorded_rows(0, 3), []
        layer: Any = next(layers_of(trainer._actor))
        layer.self_attn.q_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        rows.columns["ref_log_probs"] = trainer.log_probs("ref", rows)
        trainer.log_probs("actor", rows)
        passes = len(calls)
        accumulate(trainer, rows)
        gradients = [weight.grad for weight in trainer._actor.parameters()]
        found.append((passes, len(calls) - passes, gradients))
    (passes, once, kept), (_, twice, again) = found
    assert (once, twice) == (passes, 2 * passes)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_on_one_rank_each_layer_is_gathered_by_itself(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", characters="abcd=")
    trainer = make_trainer(options(model, fsdp_size=-1))
    names = [type(part).__name__ for part in fsdp_modules(trainer._actor)]
    assert sorted(names) == ["FSDPQwen3DecoderLayer", "FSDPQwen3DecoderLayer", "FSDPQwen3ForCausalLM"]
    plain = make_trainer(options(model))
    rows = recorded_rows(0, 3)
    for ours, theirs in zip(trainer.log_probs("actor", rows), plain.log_probs("actor", rows), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert all(hasattr(weight, "to_local") for weight in trainer._actor.parameters()), "some are whole after the pass"
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fsdp_size": 2}, "1 ranks cannot be split into copies of 2"),
        ({"fsdp_size": 0}, "1 ranks cannot be split into copies of 0"),
        ({"fsdp_size": 4, "num_train_ranks": 6}, "6 ranks cannot be split into copies of 4"),
        ({"fsdp_size": -1, "advantage_estimator": "ppo"}, "does not go with a critic"),
        ({"fsdp_size": -1, "custom_model_provider_path": "a:b"}, "does not go with --custom-model-provider-path"),
        ({"bf16": True, "model_converter_path": "a:b"}, "--model-converter-path is trained in its own number format"),
        ({"recompute_granularity": "selective"}, "the torch trainer recomputes whole layers"),
    ],
)
def test_what_split_models_and_trainers_do_not_do_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_model_options(compose(CORE_SECTIONS)(**changes))
