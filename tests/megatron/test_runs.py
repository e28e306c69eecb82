"""Whole runs with ``--train-backend megatron``: schedules and parallelisms end with the parameters of one rank; engines
sample from the weights that the ranks gather; a run is continued in another layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.cluster.session import ray_session
from buffer_rl.driver.launch import launch_training
from buffer_rl.errors import BufferRLError
from buffer_rl.files.row_file import read_rollout, write_rollout
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.testing.tiny import make_tiny_model
from harness import megatron_faults, megatron_published
from harness.megatron_routing import make_moe
from harness.megatron_rows import SECTIONS
from harness.recorded_rows import OPTIONS as RECORDED
from harness.recorded_rows import recorded_rows
from harness.trainers import LARGE_EPS

pytestmark = [pytest.mark.megatron, pytest.mark.ray, pytest.mark.timeout(600)]

STEPS, GROUPS = 10, 6
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CONTEXT = {"context_parallel_size": 2, "max_tokens_per_gpu": 20}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {TP: 2, "sequence_parallel": True}),
    "PP2": (2, {PP: 2}),
    "TP2 x DP2": (4, {TP: 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "CP2": (2, CONTEXT),
    "CP2 x DP2": (4, {**CONTEXT, "overlap_grad_reduce": True, "overlap_param_gather": True}),
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
    (folder / "letters.py").write_text("def count_a(args, sample):\n    return sample.response.count('a')\n")
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
            # Which tells samples of a random model apart, as whole answers do not: the weights change.
            "custom_rm_path": f"{task / 'letters.py'}:count_a",
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


@pytest.mark.parametrize("engine_dtype", ["bfloat16", "float32"])
def test_replayed_experts_bring_a_half_precision_engine_and_trainer_closer(
    engine_dtype: str, train: Callable[[Any], Any], options: Callable[..., Any], tmp_path: Path
) -> None:
    """An engine in the trainer's number format chooses as the trainer does, and loses nothing."""
    mixture = make_moe(tmp_path / "model")
    own = {
        "hf_checkpoint": mixture,
        "engine_dtype": engine_dtype,
        "max_logprob_diff": None,
        "num_rollout": 1,
        "rollout_max_response_len": 24,
    }
    layout = {"num_train_ranks": 2, PP: 2, "use_kl_loss": True, "max_tokens_per_gpu": 80}
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    gaps, differ = {}, {}
    for replays in (False, True):
        folder = tmp_path / str(replays)
        train(options(folder, **own, **layout, **recomputed, replay_routed_experts=replays))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        (step,) = [line for line in lines if line["kind"] == "train"]
        gaps[replays] = step["train/train_rollout_logprob_abs_diff"]
        differ[replays] = step.get("train/routed_experts_differ")
    print(engine_dtype, gaps, differ)
    assert differ[False] is None
    if engine_dtype == "bfloat16":
        assert gaps[True] < 0.9 * gaps[False]
        assert 0 < differ[True] < 0.5
    else:
        assert max(gaps.values()) < 1e-5
        assert differ[True] < 0.01


@pytest.fixture(scope="module")
def recorded(task: Path, options: Callable[..., Any]) -> Callable[..., Any]:
    """``recorded(folder, **changes)``: of a run on the recorded rollouts, with KL penalty and several micro-batches."""

    def make(folder: Path, **changes: Any) -> Any:
        own = {
            **RECORDED,
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
            **LARGE_EPS,
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
    one_rank: Callable[[str], dict[str, torch.Tensor]], task: Path
) -> None:
    assert largest_difference(one_rank("megatron"), one_rank("torch")) <= 1e-4
    start = load_file(task / "model" / "model.safetensors")
    assert largest_difference(one_rank("megatron"), start) > 1e-2, "the steps changed next to nothing"


@pytest.fixture(scope="module")
def finished(
    train: Callable[[Any], Any], recorded: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], dict[str, torch.Tensor]]:
    """The parameters that ``LAYOUTS[layout]`` ends with under ``SCHEDULES[schedule]``."""

    @cache
    def run(layout: str, schedule: str) -> dict[str, torch.Tensor]:
        ranks, changes = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("finished")
        args = recorded(folder, num_train_ranks=ranks, **changes, **SCHEDULES[schedule])
        assert train(args).steps == STEPS
        return weights_of(args)

    return run


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_end_with_the_parameters_of_one_rank(
    finished: Callable[[str, str], dict[str, torch.Tensor]],
    one_rank: Callable[[str], dict[str, torch.Tensor]],
    layout: str,
    schedule: str,
) -> None:
    assert largest_difference(finished(layout, schedule), one_rank("megatron")) <= 1e-4


PUBLISHED = Path(megatron_published.__file__)
GATHERED_LATE = {
    **{TP: 2, "sequence_parallel": True, "num_train_ranks": 4, "overlap_grad_reduce": True},
    **{"overlap_param_gather": True, "recompute_granularity": "full", "recompute_method": "uniform"},
    **{"recompute_num_layers": 1, "rollout_num_engines": 2, "lr": 5e-2},
    "custom_rollout_log_function_path": f"{PUBLISHED}:note_served",
    "custom_megatron_before_train_step_hook_path": f"{PUBLISHED}:note_trained",
}
"""What could publish stale weights: parameters gathered late, sequence parallelism, recomputed layers."""


def checksums(args: Any, rollout_id: int) -> tuple[set[str], str]:
    """Of the weights that engines sampled the rollout with, and of those that the trainer's optimizer had then."""
    served = json.loads(Path(args.run_dir, f"served_{rollout_id}.json").read_text())
    config = json.loads(Path(args.hf_checkpoint, "config.json").read_text())
    trained = megatron_published.trained_weights(args.run_dir, rollout_id, tp=2, config=config)
    folder = Path(args.run_dir, f"trained_{rollout_id}")
    return set(served.values()), megatron_published.checksum_of(trained, args.hf_checkpoint, folder)


@pytest.mark.parametrize(("mode", "context"), [("disk", 1), ("tensor", 1), ("distributed", 1), ("distributed", 2)])
def test_engines_serve_the_weights_that_the_optimizer_has(
    train: Callable[[Any], Any], options: Callable[..., Any], tmp_path: Path, mode: str, context: int
) -> None:
    """Weights come in buckets of a few thousand bytes. Two context-parallel ranks are in place of two replicas."""
    ways = {"weight_sync_mode": mode, "update_weight_buffer_size": 4096, "check_weight_update_equal": True}
    ways["context_parallel_size"] = context
    args = options(tmp_path, **GATHERED_LATE, **ways, max_logprob_diff=1e-4)
    assert train(args).steps == 3
    found = [checksums(args, rollout_id) for rollout_id in range(3)]
    assert [served for served, _ in found] == [{trained} for _, trained in found]
    assert len({trained for _, trained in found}) == 3
    lines = [json.loads(line) for line in Path(args.run_dir, "metrics.jsonl").read_text().splitlines()]
    gaps = [line["train/train_rollout_logprob_abs_diff"] for line in lines if line["kind"] == "train"]
    assert len(gaps) == 3
    assert max(gaps) < 1e-5


def test_ranks_and_engines_that_take_turns_with_their_memory_end_as_those_that_keep_it(
    train: Callable[[Any], Any], options: Callable[..., Any], task: Path, tmp_path: Path
) -> None:
    """The policy has a reference model, and two tensor ranks; two evaluations, and a checkpoint of each step."""
    found = []
    for name, own in (("kept", {}), ("offloaded", {"offload_train": True, "offload_rollout": True})):
        args = options(
            tmp_path / name,
            **{TP: 2, "num_train_ranks": 2, "deterministic": True, "use_kl_loss": True, "kl_loss_coef": 0.1},
            **{"eval_prompt_data": [f"held={task / 'train.jsonl'}@[0:4]"], "eval_interval": 3},
            **{"save": str(tmp_path / f"{name}_saves"), "save_interval": 1, "weight_sync_mode": "tensor"},
            **own,
        )
        assert train(args).steps == 3
        lines = [json.loads(line) for line in Path(args.run_dir, "metrics.jsonl").read_text().splitlines()]
        assert sum("perf/offload_time" in line for line in lines) == (3 if own else 0)
        found.append((weights_of(args), [line for line in lines if line["kind"] != "perf"]))
    (kept, metrics), (offloaded, others) = found
    assert largest_difference(offloaded, kept) == 0.0
    assert others == metrics


def test_stale_weights_are_seen(train: Callable[[Any], Any], options: Callable[..., Any], tmp_path: Path) -> None:
    fault = f"{Path(megatron_faults.__file__)}:stale_export"
    args = options(tmp_path, **GATHERED_LATE, custom_megatron_init_path=fault, max_logprob_diff=None, num_rollout=2)
    assert train(args).steps == 2
    (first, start), (second, stepped) = (checksums(args, rollout_id) for rollout_id in range(2))
    assert first == {start}
    assert stepped not in second


@pytest.mark.parametrize(
    ("before", "after"),
    [({TP: 2, "num_train_ranks": 2}, {PP: 2, "num_train_ranks": 2}), ({**CONTEXT, "num_train_ranks": 2}, {})],
    ids=["TP2 to PP2", "CP2 to one rank"],
)
def test_a_saved_run_goes_on_in_another_layout(
    train: Callable[[Any], Any],
    recorded: Callable[..., Any],
    one_rank: Callable[[str], dict[str, torch.Tensor]],
    tmp_path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    """From a checkpoint that was written while the run went on."""
    saves = {"save": str(tmp_path / "saves"), "save_interval": 2, "async_save": True}
    first = recorded(tmp_path / "first", num_rollout=4, **before, **saves)
    assert train(first).steps == 4
    second = recorded(tmp_path / "second", **after, load=str(tmp_path / "saves/step_000002"))
    assert train(second).steps == STEPS
    assert largest_difference(weights_of(second), one_rank("megatron")) <= 1e-4


KILLED = {
    "TP2, before a step": ("TP2", "lockstep", 0.0, "", 4),
    "PP2, before a step": ("PP2", "lockstep", 0.0, "", 4),
    "TP2 x DP2, streamed, before a step": ("TP2 x DP2", "streamed gradients", 1e-4, "", 4),
    "PP2, in a step": ("PP2", "lockstep", 0.0, "killed_between_gradient_and_step", 4),
    "TP2, in a save": ("TP2", "lockstep", 0.0, "killed_in_a_save", 4),
    "TP2, in an export": ("TP2", "lockstep", 0.0, "killed_in_an_export", 4),
}
"""Of each kill the layout, the schedule, how far the parameters may be from an undisturbed run's, what
``megatron_faults`` puts into the ranks, and the step of the checkpoint that the run goes on from."""


@pytest.mark.parametrize("kill", KILLED)
def test_a_run_whose_rank_is_killed_ends_with_the_parameters_of_an_undisturbed_one(
    train: Callable[[Any], Any],
    recorded: Callable[..., Any],
    finished: Callable[[str, str], dict[str, torch.Tensor]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    kill: str,
) -> None:
    """All processes start again from a checkpoint. Streamed groups are summed in the order in which they come."""
    layout, schedule, bound, fault, step = KILLED[kill]
    (tmp_path / "killer.py").write_text(KILLER)
    ranks, changes = LAYOUTS[layout]
    place = {"custom_megatron_before_train_step_hook_path": f"{tmp_path / 'killer.py'}:kill_rank_1_once"}
    if fault:
        place = {"custom_megatron_init_path": f"{Path(megatron_faults.__file__)}:{fault}"}
    args = recorded(
        tmp_path / "run",
        num_train_ranks=ranks,
        **changes,
        **SCHEDULES[schedule],
        save=str(tmp_path / "saves"),
        save_interval=2,
        progress="plain",
        **place,
    )
    assert train(args).steps == STEPS
    assert f"from the checkpoint of step {step} (global restart 1 of 3)" in capfd.readouterr().out
    assert (tmp_path / "run" / "killed").exists()
    assert largest_difference(weights_of(args), finished(layout, schedule)) <= bound


def test_a_run_begins_with_a_checkpoint_in_the_layout_of_slime(
    train: Callable[[Any], Any],
    recorded: Callable[..., Any],
    one_rank: Callable[[str], dict[str, torch.Tensor]],
    task: Path,
    tmp_path: Path,
) -> None:
    """Weights, optimizer state and step are those of the checkpoint: what Megatron wrote, and nothing beside it."""
    saves = {"save": str(tmp_path / "saves"), "save_interval": 4}
    first = recorded(tmp_path / "first", num_rollout=4, **{TP: 2, "num_train_ranks": 2}, **saves)
    assert train(first).steps == 4
    theirs = tmp_path / "theirs"
    shutil.copytree(tmp_path / "saves" / "step_000004" / "trainer", theirs, ignore=shutil.ignore_patterns("random_*"))
    assert sorted(file.name for file in theirs.iterdir()) == ["iter_0000004", "latest_checkpointed_iteration.txt"]
    for rollout_id in range(4, STEPS):
        batch = read_rollout(task / f"rollout_{rollout_id}.safetensors")
        batch.rollout_id -= 4
        batch.task = f"train_{batch.rollout_id}"
        write_rollout(tmp_path / f"rollout_{batch.rollout_id}.safetensors", batch)
    second = recorded(
        tmp_path / "second",
        **{PP: 2, "num_train_ranks": 2},
        trainer_load=str(theirs),
        num_rollout=STEPS - 4,
        load_debug_rollout_data=str(tmp_path / "rollout_{rollout_id}.safetensors"),
    )
    assert train(second).steps == STEPS - 4
    assert largest_difference(weights_of(second), one_rank("megatron")) <= 1e-4


def test_a_critic_and_an_updated_reference_end_as_those_of_the_default_backend(
    train: Callable[[Any], Any], recorded: Callable[..., Any], tmp_path: Path
) -> None:
    """Policy and critic are in processes of their own, two tensor ranks each; the reference is updated once."""
    ppo = {"advantage_estimator": "ppo", "lambd": 0.9, "num_rollout": 4, "ref_update_interval": 2}
    found = []
    for backend, own in (("torch", {}), ("megatron", {TP: 2, "num_train_ranks": 2})):
        args = recorded(tmp_path / backend, train_backend=backend, **ppo, **own)
        assert train(args).steps == 4
        lines = [json.loads(line) for line in Path(args.run_dir, "metrics.jsonl").read_text().splitlines()]
        found.append((weights_of(args), lines))
    (expected, theirs), (weights, ours) = found
    assert largest_difference(weights, expected) <= 1e-4
    for name in ("critic/loss", "critic/grad_norm", "train/kl_loss"):
        own, others = ([line[name] for line in lines if name in line] for lines in (ours, theirs))
        assert len(own) == 4
        assert own == pytest.approx(others, rel=1e-3, abs=1e-6)


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


WEIGHTED = """
from buffer_rl.kinds.token_loss import TokenLoss


def by_log_probs(args, inputs):
    return TokenLoss(-inputs.advantages * inputs.log_probs, weights=inputs.loss_mask * inputs.log_probs.exp())
"""


def test_weights_of_a_loss_that_earlier_stages_cannot_know_end_the_run(
    train: Callable[[Any], Any], recorded: Callable[..., Any], tmp_path: Path
) -> None:
    """Where these stages have layers whose experts are balanced."""
    (tmp_path / "own.py").write_text(WEIGHTED)
    args = recorded(
        tmp_path / "run",
        **{PP: 2, "num_train_ranks": 2, "max_global_restarts": 0},
        hf_checkpoint=make_tiny_model(tmp_path / "model", "qwen3_moe", characters="abc="),
        custom_loss_function_path=f"{tmp_path / 'own.py'}:by_log_probs",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.1,
    )
    with pytest.raises(BufferRLError, match="the weights of the loss depend on log-probabilities"):
        train(args)


KILLER = """
import os
import signal
from pathlib import Path


def kill_rank_1_once(args, rollout_id, step_id, model, optimizer, scheduler):
    import torch.distributed as dist

    killed = Path(args.run_dir, "killed")
    if rollout_id == 5 and dist.get_rank() == 1 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def kill_rank_1(args, rollout_id, step_id, model, optimizer, scheduler):
    import torch.distributed as dist

    if rollout_id == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
