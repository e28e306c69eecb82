"""Whole runs with ``--train-backend megatron``: schedules and parallelisms end with the parameters of one rank; engines
sample from the weights that the ranks gather; a run is continued in another layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.buffer.row_file import write_rollout
from buffer_rl.cluster.session import ray_session
from buffer_rl.config import compose
from buffer_rl.driver.launch import launch_training
from buffer_rl.errors import BufferRLError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.testing.tiny import make_tiny_model
from harness.megatron_rows import SECTIONS
from harness.recorded_rows import OPTIONS as RECORDED
from harness.recorded_rows import recorded_rows

pytestmark = [pytest.mark.megatron, pytest.mark.ray, pytest.mark.timeout(600)]

STEPS, GROUPS = 10, 6
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {TP: 2, "sequence_parallel": True}),
    "PP2": (2, {PP: 2}),
    "TP2 x DP2": (4, {TP: 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "lockstep": {},
    "streamed gradients": {"schedule": "pipelined", "stream_gradients": True},
}
WORDS = ("ab", "ba", "abc", "bca", "cab", "acb", "bb", "cc")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with ray_session(None):
        yield


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model``, ``train.jsonl`` and recorded rollouts."""
    folder = tmp_path_factory.mktemp("task")
    make_tiny_model(folder / "model", characters="abc=", hidden_size=32, intermediate_size=48)
    rows = [{"prompt": f"{word}=", "label": word[::-1]} for word in WORDS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rollout_id in range(STEPS):
        write_rollout(folder / f"rollout_{rollout_id}.safetensors", recorded_rows(rollout_id, GROUPS))
    return folder


@pytest.fixture(scope="module")
def options(task: Path) -> Callable[..., Any]:
    """``options(folder, **changes)``: of a run with one Megatron rank."""

    def make(folder: Path, **changes: Any) -> Any:
        given: dict[str, Any] = {
            "train_backend": "megatron",
            "train_device": "cpu",
            "run_dir": str(folder),
            "prompt_data": str(task / "train.jsonl"),
            "hf_checkpoint": str(task / "model"),
            "num_rollout": 3,
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 6,
            "rm_type": "exact_match",
            "lr": 1e-2,
            "logger": [],
            "progress": "none",
            "engine_max_running_requests": 16,
            "engine_context_length": 64,
            "train_timeout_s": 120.0,
        }
        return compose(SECTIONS)(**{**given, **changes})

    return make


@pytest.fixture(scope="module")
def train(ray_cluster: None) -> Callable[[Any], Any]:
    """Runs options to their end, in this process."""
    return lambda args: launch_training(args, PluginRegistry.from_flags(args.plugin))


def weights_of(args: Any) -> dict[str, torch.Tensor]:
    return load_file(Path(args.run_dir) / "hf" / "model.safetensors")


def largest_difference(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == others.keys()
    return max(float((ours[name] - others[name]).abs().max()) for name in ours)


@pytest.fixture(scope="module")
def recorded(task: Path, options: Callable[..., Any]) -> Callable[..., Any]:
    """``recorded(folder, **changes)``: of a run on the recorded rollouts, with KL penalty and several micro-batches."""

    def make(folder: Path, **changes: Any) -> Any:
        own = {
            **RECORDED,
            "rm_type": None,
            "deterministic": False,
            "load_debug_rollout_data": str(task / "rollout_{rollout_id}.safetensors"),
            "num_rollout": STEPS,
            "rollout_batch_size": GROUPS,
            # Streamed work is then dealt a group at a time to each replica, as the sizes of deals count samples.
            "n_samples_per_prompt": 1,
            "max_tokens_per_gpu": 40,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "weight_decay": 0.1,
            "adam_eps": 1e-2,
        }
        return options(folder, **{**own, **changes})

    return make


@pytest.fixture(scope="module")
def one_rank(
    train: Callable[[Any], Any], recorded: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, torch.Tensor]]:
    """The parameters that a backend ends with on one rank, in lockstep."""

    @cache
    def run(backend: str) -> dict[str, torch.Tensor]:
        args = recorded(tmp_path_factory.mktemp(backend), train_backend=backend)
        assert train(args).steps == STEPS
        return weights_of(args)

    return run


def test_one_rank_ends_with_the_parameters_of_the_default_backend(
    one_rank: Callable[[str], dict[str, torch.Tensor]],
) -> None:
    assert largest_difference(one_rank("megatron"), one_rank("torch")) <= 1e-4


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_end_with_the_parameters_of_one_rank(
    train: Callable[[Any], Any],
    recorded: Callable[..., Any],
    one_rank: Callable[[str], dict[str, torch.Tensor]],
    tmp_path: Path,
    layout: str,
    schedule: str,
) -> None:
    ranks, changes = LAYOUTS[layout]
    args = recorded(tmp_path, num_train_ranks=ranks, **changes, **SCHEDULES[schedule])
    assert train(args).steps == STEPS
    assert largest_difference(weights_of(args), one_rank("megatron")) <= 1e-4


def test_engines_sample_from_the_weights_that_the_ranks_gather(
    train: Callable[[Any], Any], options: Callable[..., Any], tmp_path: Path
) -> None:
    """Also with what could publish stale weights: recomputed layers, sequence parallelism, parameters gathered late."""
    late = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    args = options(
        tmp_path,
        **{TP: 2, "sequence_parallel": True, "num_train_ranks": 4, **late, **again},
        check_weight_update_equal=True,
        max_logprob_diff=1e-4,
        lr=5e-2,
    )
    assert train(args).steps == 3
    lines = [json.loads(line) for line in Path(args.run_dir, "metrics.jsonl").read_text().splitlines()]
    gaps = [line["train/train_rollout_logprob_abs_diff"] for line in lines if line["kind"] == "train"]
    assert len(gaps) == 3
    assert max(gaps) < 1e-5


def test_a_saved_run_goes_on_in_another_layout(
    train: Callable[[Any], Any],
    recorded: Callable[..., Any],
    one_rank: Callable[[str], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    saves = {"save": str(tmp_path / "saves"), "save_interval": 4}
    first = recorded(tmp_path / "first", num_rollout=4, **{TP: 2, "num_train_ranks": 2}, **saves)
    assert train(first).steps == 4
    second = recorded(tmp_path / "second", **{PP: 2, "num_train_ranks": 2}, load=str(tmp_path / "saves"))
    assert train(second).steps == STEPS
    assert largest_difference(weights_of(second), one_rank("megatron")) <= 1e-4


def test_a_killed_rank_ends_the_run_with_its_name(
    train: Callable[[Any], Any], recorded: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    hook = f"{tmp_path / 'killer.py'}:kill_rank_1"
    args = recorded(
        tmp_path / "run",
        **{TP: 2, "num_train_ranks": 2, "max_global_restarts": 0},
        custom_megatron_before_train_step_hook_path=hook,
    )
    with pytest.raises(BufferRLError, match="actor"):
        train(args)


KILLER = """
import os
import signal


def kill_rank_1(args, rollout_id, step_id, model, optimizer, scheduler):
    import torch.distributed as dist

    if rollout_id == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
