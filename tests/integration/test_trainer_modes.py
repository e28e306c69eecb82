"""Whole runs with two trainer ranks, with several steps a rollout, and with one half of a run alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.errors import PluginError
from harness.processes import descendants, holds_within
from harness.trainers import LARGE_EPS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

Run = Callable[[Any], Any]
MakeOptions = Callable[..., Any]

OPTIONS = {
    "eval_prompt_data": [],
    "eval_interval": None,
    "deterministic": True,
    "num_steps_per_rollout": 2,
    "lr_decay_style": "cosine",
    **LARGE_EPS,
}


def weights_of(run_dir: str) -> dict[str, torch.Tensor]:
    return load_file(Path(run_dir) / "hf" / "model.safetensors")


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of any tensor, relative to that tensor's largest value."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / a[name].abs().max()) for name in a)


def train_metrics(run_dir: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def no_process(*roles: str) -> bool:
    wanted = tuple(f"ray::{role}" for role in roles)
    return not [process for process in descendants(os.getpid()) if process.command.startswith(wanted)]


@pytest.fixture(scope="module")
def recorded(train: Run, options_in: MakeOptions, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The options of a run of one rank, three rollouts and two steps on each, that wrote its rollouts."""
    folder = tmp_path_factory.mktemp("recorded")
    template = str(folder / "rollout_{rollout_id}.safetensors")
    args = options_in(folder / "run", save_debug_rollout_data=template, **OPTIONS)
    assert train(args).steps == 3
    return args


def test_two_ranks_end_with_the_parameters_of_one(train: Run, make_options: MakeOptions, recorded: Any) -> None:
    args = make_options(num_train_ranks=2, **OPTIONS)
    assert train(args).steps == 3
    assert largest_difference(weights_of(recorded.run_dir), weights_of(args.run_dir)) <= 1e-6
    rates = [line["train/lr"] for line in train_metrics(args.run_dir)]
    # The last of two steps on each of three rollouts: steps 1, 3 and 5 of 6; the cosines of 30, 90 and 150 degrees.
    assert rates == pytest.approx([1e-2 * (1 + cosine) / 2 for cosine in (0.75**0.5, 0.0, -(0.75**0.5))])


def test_training_on_the_recorded_rollouts_alone_gives_the_same_parameters_and_metrics(
    train: Run, make_options: MakeOptions, recorded: Any
) -> None:
    args = make_options(
        load_debug_rollout_data=recorded.save_debug_rollout_data, prompt_data=[], custom_rm_path=None, **OPTIONS
    )
    assert train(args).steps == 3
    assert largest_difference(weights_of(recorded.run_dir), weights_of(args.run_dir)) == 0
    assert train_metrics(args.run_dir) == train_metrics(recorded.run_dir)
    logs = {path.name for path in (Path(args.run_dir) / "logs").iterdir()}
    assert logs == {"train_0.log"}  # no engine, no router, no rollout worker


@pytest.mark.slow
def test_passes_and_the_steps_of_a_batch_size_multiply(train: Run, make_options: MakeOptions, recorded: Any) -> None:
    args = make_options(
        load_debug_rollout_data=recorded.save_debug_rollout_data,
        prompt_data=[],
        custom_rm_path=None,
        num_passes_per_rollout=2,
        global_batch_size=4,  # of 3 groups of 4 samples
        **{name: value for name, value in OPTIONS.items() if name != "num_steps_per_rollout"},
    )
    assert train(args).steps == 3
    rates = [line["train/lr"] for line in train_metrics(args.run_dir)]
    # The last of six steps on each of three rollouts: steps 5, 11 and 17 of 18.
    assert rates == pytest.approx([1e-2 * (1 + math.cos(math.pi * step / 18)) / 2 for step in (5, 11, 17)])


OVER_THE_ROLLOUT = """
import numpy as np

from buffer_rl.kinds.token_loss import TokenLoss
from buffer_rl.kinds.marks import loss_unit


def whitened(args, batch):
    '''Rewards of the whole rollout with mean 0 and deviation 1, and each row's rank among them.'''
    assert len(batch) == args.rollout_batch_size * args.n_samples_per_prompt, len(batch)
    rewards = np.asarray(batch.columns["raw_reward"], dtype=np.float64)
    values = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    places = rewards.argsort(kind="stable").argsort() / len(rewards)
    lengths = batch.columns["response_length"]
    for name, numbers in (("advantages", values), ("returns", values), ("place", places)):
        batch.columns[name] = [np.full(n, x, dtype=np.float32) for n, x in zip(lengths, numbers, strict=True)]


@loss_unit("token", needs="place")
def by_place(args, inputs):
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    return TokenLoss(-inputs.advantages * ratio * inputs["place"])
"""


@pytest.mark.slow
def test_an_estimator_of_the_whole_rollout_gives_two_ranks_and_two_steps_what_it_gives_one(
    train: Run, options_in: MakeOptions, recorded: Any, tmp_path: Path
) -> None:
    """It runs once on all rows, and the loss reads a column that it adds."""
    (tmp_path / "mine.py").write_text(OVER_THE_ROLLOUT)
    own = {
        "load_debug_rollout_data": recorded.save_debug_rollout_data,
        "custom_advantage_function_path": f"{tmp_path / 'mine.py'}:whitened",
        "custom_loss_function_path": f"{tmp_path / 'mine.py'}:by_place",
    }
    runs = [options_in(tmp_path / str(ranks), num_train_ranks=ranks, **own, **OPTIONS) for ranks in (1, 2)]
    for args in runs:
        assert train(args).steps == 3
    one, two = (weights_of(args.run_dir) for args in runs)
    assert largest_difference(one, two) <= 1e-6
    assert largest_difference(one, weights_of(recorded.run_dir)) > 1e-3, "the estimator has no effect"


LOSS = """
import torch
from buffer_rl.algo.losses import policy_loss

def fails_on_one_rank(args, inputs):
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("this rank has had enough")
    return policy_loss(args, inputs)
"""


def test_a_rank_that_raises_ends_the_run_by_its_name_while_the_other_waits_for_it(
    train: Run, make_options: MakeOptions, recorded: Any, tmp_path: Path
) -> None:
    """The other rank waits in the sum of the gradients, for the hour of --train-timeout-s if nobody ended it."""
    (tmp_path / "my_loss.py").write_text(LOSS)
    args = make_options(
        load_debug_rollout_data=recorded.save_debug_rollout_data,
        num_train_ranks=2,
        custom_loss_function_path=f"{tmp_path / 'my_loss.py'}:fails_on_one_rank",
        **OPTIONS,
    )
    with pytest.raises(PluginError, match=r"my_loss\.py:fails_on_one_rank(.|\n)*this rank has had enough"):
        train(args)
    assert holds_within(30, lambda: no_process("TrainRank", "BufferActor"))


def test_generating_alone_starts_no_trainer_and_evaluates_the_initial_weights(
    train: Run, make_options: MakeOptions, tmp_path: Path
) -> None:
    template = str(tmp_path / "rows_{rollout_id}.safetensors")
    args = make_options(debug_rollout_only=True, num_rollout=2, save_debug_rollout_data=template)
    result = train(args)
    assert result.steps == 2
    assert set(result.evaluation) >= {"eval/held"}
    assert sorted(path.name for path in tmp_path.glob("rows_*")) == ["rows_0.safetensors", "rows_1.safetensors"]
    assert train_metrics(args.run_dir) == []
    assert not (Path(args.run_dir) / "hf").exists()
    assert not (Path(args.run_dir) / "logs" / "train_0.log").exists()
