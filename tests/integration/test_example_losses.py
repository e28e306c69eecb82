"""Whole runs on recorded rollouts with the losses of examples/losses: streamed gradients, and several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.files.row_file import write_rollout
from harness.recorded_rows import OPTIONS, recorded_rows

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

LOSSES = Path(__file__).resolve().parents[2] / "examples" / "losses"
NUM_GROUPS, STEPS = 4, 3
WAYS = {
    "streamed": {"schedule": "pipelined", "stream_gradients": True},
    "streamed to two replicas": {"schedule": "pipelined", "stream_gradients": True, "num_train_ranks": 2},
    "balanced": {"schedule": "pipelined", "stream_gradients": True, "num_train_ranks": 2, "balance_data": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gspo.py:gspo", "weighted.py:weighted"])
def test_streamed_gradients_end_with_the_parameters_of_lockstep(
    train: Callable[[Any], Any], options_in: Callable[..., Any], tmp_path: Path, loss: str
) -> None:
    for rollout_id in range(STEPS):
        batch = recorded_rows(rollout_id, NUM_GROUPS)
        batch.columns["difficulty"] = np.linspace(0.2, 1, len(batch)).astype(np.float32)  # of the user's converter
        write_rollout(tmp_path / f"rows_{rollout_id}", batch)

    def weights(name: str, **changes: Any) -> dict[str, torch.Tensor]:
        options = {
            **OPTIONS,
            "load_debug_rollout_data": str(tmp_path / "rows_{rollout_id}"),
            "custom_loss_function_path": str(LOSSES / loss),
            "rollout_batch_size": NUM_GROUPS,
        }
        args = options_in(tmp_path / name, **{**options, **changes})
        assert train(args).steps == STEPS
        return load_file(Path(args.run_dir) / "hf" / "model.safetensors")

    lockstep = weights("lockstep")
    for way, changes in WAYS.items():
        for name, tensor in weights(way, **changes).items():
            assert torch.equal(tensor, lockstep[name]), (way, name)
