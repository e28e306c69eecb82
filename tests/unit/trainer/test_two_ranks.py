from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from buffer_rl.cluster.process import reserved_port
from buffer_rl.options.section import Options
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.steps import StepReport
from harness.scripts import run_scripts
from harness.trainers import LARGE_EPS, make_trainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]
DEADLINE_S = 120
INFINITE = """
import torch
from buffer_rl.kinds.token_loss import TokenLoss


def infinite(args, inputs):
    return TokenLoss(inputs.log_probs + torch.where(inputs.advantages > 1e9, torch.inf, 0.0))
"""


def _run(
    world_size: int, job_file: Path, folder: Path
) -> list[tuple[StepReport, dict[str, torch.Tensor], float | None]]:
    """Of each rank: its report, its weights, and the KL coefficient of the next rollout."""
    outs = [folder / f"{world_size}_{rank}.pt" for rank in range(world_size)]
    script = str(Path(__file__).parent / "one_rank.py")
    scripts = [[script, str(job_file), str(rank), str(world_size), str(out)] for rank, out in enumerate(outs)]
    with reserved_port("127.0.0.1") as held:
        port = str(held.getsockname()[1])
        run_scripts(scripts, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}, DEADLINE_S)
    return [pickle.loads(out.read_bytes()) for out in outs]


def test_two_ranks_equal_one_rank(
    make_args: Callable[..., Options], make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    """Two steps; then one that fails, because of a row that only one rank has; then one with fewer rows than ranks."""
    batches = [make_batch(seed=0), make_batch(seed=1), make_batch(seed=2), make_batch(seed=3).select([1])]
    batches[2].columns["reward"][3] = np.float32(3e38)
    job_file = tmp_path / "job"
    kl = {"use_kl_loss": True, "kl_loss_coef": 1e-3, "kl_target": 0.1, "kl_horizon": 1000.0, "max_non_finite_steps": 9}
    args = make_args(train_timeout_s=60.0, max_tokens_per_gpu=40, **LARGE_EPS, **kl)
    for batch in batches:
        near = [row + np.float32(0.1) for row in make_trainer(args).log_probs("actor", batch)]
        batch.columns["ref_log_probs"] = near
    job_file.write_bytes(pickle.dumps((args, batches)))
    ((one, weights, coefficient),) = _run(1, job_file, tmp_path)
    (first, first_weights, first_coefficient), (second, second_weights, second_coefficient) = _run(
        2, job_file, tmp_path
    )

    assert coefficient not in (None, 1e-3)
    assert first_coefficient == second_coefficient == pytest.approx(coefficient, rel=1e-7)
    assert StepReport.metrics_of([one])["ref_kl"] > 0
    assert one.non_finite == first.non_finite == second.non_finite == 1
    assert first.metrics == second.metrics
    for name, tensor in weights.items():
        assert torch.equal(first_weights[name], second_weights[name]), f"{name} differs between the ranks"
        torch.testing.assert_close(first_weights[name], tensor, atol=1e-6, rtol=1e-5)
    assert StepReport.metrics_of([first, second]) == pytest.approx(StepReport.metrics_of([one]), rel=1e-4, abs=1e-5)


def test_a_loss_that_is_infinite_on_one_rank_alone_leaves_both_ranks_as_they_were(
    make_args: Callable[..., Options], make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    losses = tmp_path / "losses.py"
    losses.write_text(INFINITE)
    batch = make_batch(seed=0)
    batch.columns["reward"][3] = np.float32(1e30)
    job_file = tmp_path / "job"
    args = make_args(train_timeout_s=60.0, custom_loss_function_path=f"{losses}:infinite", grpo_std_normalization=False)
    initial = make_trainer(args)
    job_file.write_bytes(pickle.dumps((args, [batch])))
    for report, weights, _ in _run(2, job_file, tmp_path):
        assert report.non_finite == 1
        for bucket in initial.export():
            for name, tensor in bucket.items():
                assert torch.equal(weights[name], tensor), name
