"""Whole runs on recorded rollouts with the trainer backends of examples/trainer_backends, beside the default one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.cli import main
from buffer_rl.files.row_file import write_rollout
from harness.recorded_rows import recorded_rows
from harness.trainers import LARGE_EPS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

Run = Callable[[Any], Any]
MakeOptions = Callable[..., Any]

BACKENDS = Path(__file__).resolve().parents[2] / "examples" / "trainer_backends"
TENSOR_PARALLEL = f"{BACKENDS / 'tensor_parallel.py'}:TensorParallelTrainer"
NUM_ROLLOUTS, NUM_GROUPS = 3, 5

OPTIONS = {
    "prompt_data": [],
    "custom_rm_path": None,
    "eval_prompt_data": [],
    "eval_interval": None,
    "num_rollout": NUM_ROLLOUTS,
    "rollout_batch_size": NUM_GROUPS,
    # Streamed work is then dealt a group at a time to each replica, as the sizes of deals count samples.
    "n_samples_per_prompt": 1,
    "max_logprob_diff": None,
    "train_timeout_s": 60.0,
    # Several micro-batches of each deal, and not equally many on all replicas.
    "max_tokens_per_gpu": 40,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "weight_decay": 0.1,
    **LARGE_EPS,
}
SCHEDULES = {
    "lockstep": {},
    "streamed gradients": {"schedule": "pipelined", "stream_gradients": True},
    "streamed log-probabilities": {"schedule": "pipelined", "num_steps_per_rollout": 2},
}


def weights_of(run_dir: str) -> dict[str, torch.Tensor]:
    return load_file(Path(run_dir) / "hf" / "model.safetensors")


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
def difference(train: Run, options: MakeOptions, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], float]:
    """The largest one between the parameters that a run ended with and those of the default backend on one rank."""

    @cache
    def default(num_steps: int) -> dict[str, torch.Tensor]:
        args = options(tmp_path_factory.mktemp("default"), "lockstep", num_steps_per_rollout=num_steps)
        assert train(args).steps == NUM_ROLLOUTS
        return weights_of(args.run_dir)

    def compare(args: Any) -> float:
        ours, others = weights_of(args.run_dir), default(args.num_steps_per_rollout)
        assert ours.keys() == others.keys()
        return max(float((ours[name] - others[name]).abs().max()) for name in ours)

    return compare


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_tensor_parallel_ranks_end_with_the_parameters_of_the_default_backend(
    train: Run, options: MakeOptions, difference: Callable[[Any], float], tmp_path: Path, schedule: str
) -> None:
    args = options(tmp_path, schedule, num_train_ranks=2, train_backend=TENSOR_PARALLEL)
    assert train(args).steps == NUM_ROLLOUTS
    assert difference(args) <= 1e-6


def test_engines_sample_from_the_weights_that_tensor_parallel_ranks_gather(
    train: Run, options_in: MakeOptions, tmp_path: Path
) -> None:
    changes = {"eval_prompt_data": [], "eval_interval": None, "max_logprob_diff": 1e-4}
    args = options_in(tmp_path / "run", num_train_ranks=2, train_backend=TENSOR_PARALLEL, **changes)
    assert train(args).steps == NUM_ROLLOUTS
    lines = [json.loads(line) for line in Path(args.run_dir, "metrics.jsonl").read_text().splitlines()]
    gaps = [line["train/train_rollout_logprob_abs_diff"] for line in lines if line["kind"] == "train"]
    assert len(gaps) == NUM_ROLLOUTS
    assert max(gaps) < 1e-4


COUNTING = """
from in_step import InStepTrainer


class CountsRows(InStepTrainer):
    def __init__(self, args, rank, world_size, objective):
        super().__init__(args, rank, world_size, objective)
        self._file = f"{args.run_dir}/rows_{rank}"

    def _passes(self, batch):  # of each call of log_probs and accumulate
        with open(self._file, "a") as file:
            print(len(batch), file=file)
        return super()._passes(batch)
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_in_step_end_with_the_parameters_of_the_default_backend(
    train: Run, options: MakeOptions, difference: Callable[[Any], float], tmp_path: Path, schedule: str
) -> None:
    """Of streamed groups each replica is dealt one at a time, of five: one of them has no rows in the last deal."""
    shutil.copy(BACKENDS / "in_step.py", tmp_path)
    (tmp_path / "counting.py").write_text(COUNTING)
    args = options(tmp_path, schedule, num_train_ranks=2, train_backend=f"{tmp_path / 'counting.py'}:CountsRows")
    assert train(args).steps == NUM_ROLLOUTS
    assert difference(args) <= 1e-6
    rows = [[int(line) for line in Path(args.run_dir, f"rows_{rank}").read_text().split()] for rank in (0, 1)]
    assert len(rows[0]) == len(rows[1])
    # Two calls for each deal: reference and old log-probabilities, or the former and the gradients.
    assert [*rows[0], *rows[1]].count(0) == (0 if schedule == "lockstep" else 2 * NUM_ROLLOUTS)


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
    data += ["--rollout-max-response-len", "6"]
    model = ["--hf-checkpoint", str(task / "model"), "--run-dir", str(tmp_path / "run")]
    backend = ["--train-backend", f"{tmp_path / 'earlier.py'}:Trainer"]
    assert main(["train", *data, *model, *backend]) == 2
    said = capsys.readouterr().err
    assert "earlier.py:Trainer" in said
    assert "accumulate" in said  # what there is now in place of forward_backward
    assert not (tmp_path / "run" / "logs").exists()
