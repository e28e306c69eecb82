"""Whole runs on recorded rollouts with the trainer backends of examples/trainer_backends, beside the default one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.buffer.row_file import write_rollout
from buffer_rl.cli import main
from harness.recorded_rows import SAMPLES, recorded_rows

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

Run = Callable[[Any], Any]
MakeOptions = Callable[..., Any]

BACKENDS = Path(__file__).resolve().parents[2] / "examples" / "trainer_backends"
NUM_ROLLOUTS, NUM_GROUPS = 3, 5

OPTIONS = {
    "prompt_data": [],
    "custom_rm_path": None,
    "eval_prompt_data": [],
    "eval_interval": None,
    "num_rollout": NUM_ROLLOUTS,
    "rollout_batch_size": NUM_GROUPS,
    "n_samples_per_prompt": SAMPLES,
    "max_logprob_diff": None,
    "train_timeout_s": 60.0,
    # Several micro-batches of each deal, and not equally many on all replicas.
    "max_tokens_per_gpu": 40,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "weight_decay": 0.1,
    # A large epsilon: Adam's first steps blow rounding errors of tiny gradients up to the size of the learning rate.
    "adam_eps": 1e-2,
}
SCHEDULES = {"lockstep": {}, "streamed": {"schedule": "pipelined", "stream_gradients": True}}


def weights_of(run_dir: str) -> dict[str, torch.Tensor]:
    return load_file(Path(run_dir) / "hf" / "model.safetensors")


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture(scope="module")
def options(options_in: MakeOptions, tmp_path_factory: pytest.TempPathFactory) -> MakeOptions:
    """Options of a run on the recorded rollouts: ``options(folder, schedule, **changes)``."""
    template = tmp_path_factory.mktemp("recorded") / "rollout_{rollout_id}.safetensors"
    for rollout_id in range(NUM_ROLLOUTS):
        path = Path(str(template).replace("{rollout_id}", str(rollout_id)))
        write_rollout(path, recorded_rows(rollout_id, NUM_GROUPS))

    def make(folder: Path, schedule: str, **changes: Any) -> Any:
        given = {"load_debug_rollout_data": str(template), **OPTIONS, **SCHEDULES[schedule], **changes}
        return options_in(folder / "run", **given)

    return make


@pytest.fixture(scope="module")
def default_weights(
    train: Run, options: MakeOptions, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """Those that the default backend ends with, on one rank."""
    args = options(tmp_path_factory.mktemp("default"), "lockstep")
    assert train(args).steps == NUM_ROLLOUTS
    return weights_of(args.run_dir)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_tensor_parallel_ranks_end_with_the_parameters_of_the_default_backend(
    train: Run, options: MakeOptions, default_weights: dict[str, torch.Tensor], tmp_path: Path, schedule: str
) -> None:
    backend = f"{BACKENDS / 'tensor_parallel.py'}:TensorParallelTrainer"
    args = options(tmp_path, schedule, num_train_ranks=2, train_backend=backend)
    assert train(args).steps == NUM_ROLLOUTS
    assert largest_difference(weights_of(args.run_dir), default_weights) <= 1e-6


COUNTING = """
from in_step import InStepTrainer


class CountsRows(InStepTrainer):
    def __init__(self, args, rank, world_size, objective):
        super().__init__(args, rank, world_size, objective)
        self._file = f"{args.run_dir}/rows_{rank}"

    def accumulate(self, batch):
        with open(self._file, "a") as file:
            print(len(batch), file=file)
        return super().accumulate(batch)
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_in_step_end_with_the_parameters_of_the_default_backend(
    train: Run, options: MakeOptions, default_weights: dict[str, torch.Tensor], tmp_path: Path, schedule: str
) -> None:
    """Groups are dealt one to each replica, five of them: of the last deal one replica has no rows."""
    shutil.copy(BACKENDS / "in_step.py", tmp_path)
    (tmp_path / "counting.py").write_text(COUNTING)
    args = options(tmp_path, schedule, num_train_ranks=2, train_backend=f"{tmp_path / 'counting.py'}:CountsRows")
    assert train(args).steps == NUM_ROLLOUTS
    assert largest_difference(weights_of(args.run_dir), default_weights) <= 1e-6
    rows = [[int(line) for line in Path(args.run_dir, f"rows_{rank}").read_text().split()] for rank in (0, 1)]
    assert len(rows[0]) == len(rows[1])
    if schedule == "streamed":
        assert [min(pair) for pair in zip(*rows, strict=True)].count(0) == NUM_ROLLOUTS


EARLIER = """
class Trainer:
    def __init__(self, args, rank, world_size):
        pass

    def log_probs(self, model, batch): ...
    def compute_advantages(self, batch): ...
    def forward_backward(self, batch): ...
    def optimizer_step(self): ...
    def zero_grad(self): ...
    def export_buckets(self): ...
    def save_hf(self, path): ...
    def save(self, path): ...
    def load(self, path): ...
"""


def test_a_backend_of_the_earlier_contract_is_refused_before_ray_is_started(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "earlier.py").write_text(EARLIER)
    data = ["--prompt-data", str(task / "train.jsonl"), "--rm-type", "exact_match", "--num-rollout", "1"]
    model = ["--hf-checkpoint", str(task / "model"), "--run-dir", str(tmp_path / "run")]
    backend = ["--train-backend", f"{tmp_path / 'earlier.py'}:Trainer"]
    assert main(["train", *data, *model, *backend]) == 2
    said = capsys.readouterr().err
    assert "earlier.py:Trainer" in said
    assert "accumulate" in said  # what there is now in place of forward_backward
    assert not (tmp_path / "run" / "logs").exists()
