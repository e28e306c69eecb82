"""Models that are split over ranks, beside the same model on one rank; tests/unit/examples/test_trainer_backends.py has
more of two ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.driver.role_checks import check_roles
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import TrainBatch
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.train.sharding import Sharding, fsdp_modules
from harness.backend_ranks import groups_of, largest_difference, run_ranks
from harness.recorded_rows import recorded_rows
from harness.trainers import LARGE_EPS, make_trainer

Steps = list[list[list[TrainBatch]]]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "size", "recorded"), [("qwen2", -1, False), ("llama", 2, True), ("qwen3_moe", 2, False)]
)
def test_four_ranks_train_as_one(tmp_path: Path, architecture: str, size: int, recorded: bool) -> None:
    """Uneven shares, and none: once a copy over four ranks, and two copies over two each. qwen2 and qwen3 are tied."""
    model = make_tiny_model(tmp_path / "model", architecture=architecture, characters="abcd=", init_scale=0.3)
    args = options(model)
    ((alone,),) = trained(tmp_path / "1", [("torch", args, dealt(3, WHOLE))], 1)
    split = args.model_copy(update={"fsdp_size": size, "deterministic": recorded})
    (ranks,) = trained(tmp_path / "4", [("torch", split, dealt(3, *FOUR))], 4)
    for rank in ranks:
        assert largest_difference(rank["weights"], alone["weights"]) <= 1e-6
        assert largest_difference(rank["resumed"], rank["weights"]) == 0
    expected = [step["grad_norm"] for step in alone["steps"]]
    assert [step["grad_norm"] for step in ranks[0]["steps"]] == pytest.approx(expected, rel=1e-5)


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


@pytest.mark.slow
def test_one_rank_that_is_split_has_the_bits_of_one_that_is_not_and_two_ranks_repeat_theirs(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", characters="abcd=", init_scale=0.3)
    steps = dealt(2, *TWO_DEALS)
    job = [("torch", options(model), steps), ("torch", options(model, fsdp_size=-1), steps)]
    (plain,), (split,) = trained(tmp_path / "1", job, 1)
    assert largest_difference(split["weights"], plain["weights"]) == 0
    twice = trained(tmp_path / "2", [("torch", options(model, fsdp_size=2), dealt(2, *TWO))] * 2, 2)
    assert largest_difference(twice[0][0]["weights"], twice[1][1]["weights"]) == 0


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


def test_tied_embeddings_that_cannot_be_split_equally_are_refused() -> None:
    class Tied(torch.nn.Module):
        @property
        def all_tied_weights_keys(self) -> dict[str, str]:
            return {"head": "embed"}

        def get_input_embeddings(self) -> torch.nn.Module:
            return torch.nn.Embedding(7, 4)

    with pytest.raises(ConfigError, match=r"--fsdp-size: 7 tied embeddings are no multiple of 2"):
        Sharding(2, 1).apply(Tied())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fsdp_size": 2}, "1 ranks cannot be split into copies of 2"),
        ({"fsdp_size": 0}, "1 ranks cannot be split into copies of 0"),
        ({"fsdp_size": 4, "num_train_ranks": 6}, "6 ranks cannot be split into copies of 4"),
        ({"fsdp_size": -1, "advantage_estimator": "ppo"}, "does not go with a critic"),
        ({"fsdp_size": -1, "custom_model_provider_path": "a:b"}, "does not go with --custom-model-provider-path"),
        ({"fsdp_size": -1, "offload_train": True}, "does not go with --offload-train"),
    ],
)
def test_what_does_not_go_with_split_models_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_roles(compose(CORE_SECTIONS)(**changes), PluginRegistry())
