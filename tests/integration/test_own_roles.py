"""Whole runs with the roles and the loss of examples/roles: in processes of their own, or of one that both share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.files.row_file import write_rollout
from harness.recorded_rows import OPTIONS, SAMPLES, recorded_rows

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

FILE = Path(__file__).resolve().parents[2] / "examples" / "roles" / "weights.py"
NUM_GROUPS, STEPS = 4, 3
ROLES = {"role_path": [f"{FILE}:Novelty", f"{FILE}:Brevity"]}
STREAMED = {"fuse_roles": ["novelty+brevity"], "schedule": "pipelined", "stream_gradients": True}

# Its process ends itself once, in its second batch.
MORTAL = f"""
import os, signal, sys
from pathlib import Path

sys.path.append({str(FILE.parent)!r})
import weights


class Mortal(weights.Novelty):
    def __init__(self, args):
        super().__init__(args)
        self.died, self.calls = Path(args.run_dir, "died"), 0

    def compute(self, batch):
        self.calls += 1
        if self.calls == 2 and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute(batch)
"""

# It reads a step twice, and ends its process once, in the second pass, after it has written a group.
TWICE = f"""
import os, signal, sys
from pathlib import Path

sys.path.append({str(FILE.parent)!r})
import weights


class Twice(weights.Brevity):
    def __init__(self, args):
        super().__init__(args)
        self.died = Path(args.run_dir, "died")

    def work(self, dataset):
        computed = [self.compute(batch) for batch in dataset]
        assert sum(len(columns["brevity"]) for columns in computed) == {NUM_GROUPS * (SAMPLES + 1)}
        for number, batch in enumerate(dataset):
            dataset.write(batch, computed[number])
            if number == 1 and not self.died.exists():
                self.died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
"""


def fields_of(batch: Any) -> dict[str, Any]:
    """What the two roles compute, written another way."""
    rows = list(zip(batch.columns["tokens"], batch.columns["response_length"].tolist(), strict=True))
    responses = [tokens[len(tokens) - length :].tolist() for tokens, length in rows]
    trigrams = [[tuple(response[i - 2 : i + 1]) for i in range(2, len(response))] for response in responses]
    novelty = [
        np.array([float(i < 2 or of_row[i - 2] not in of_row[: i - 2]) for i in range(len(response))], dtype=np.float32)
        for response, of_row in zip(responses, trigrams, strict=True)
    ]
    groups: dict[Any, list[int]] = {}
    for row_id, response in zip(batch.row_ids, responses, strict=True):
        groups.setdefault(row_id.uid, []).append(len(response) + 1)
    brevity = [
        min(groups[row_id.uid]) / (len(response) + 1) for row_id, response in zip(batch.row_ids, responses, strict=True)
    ]
    return {"novelty": novelty, "brevity": np.array(brevity, dtype=np.float32)}


@pytest.mark.slow
def test_fields_of_own_roles_train_as_if_the_rollout_had_given_them(
    train: Callable[[Any], Any], options_in: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    repeated = 0
    for rollout_id in range(STEPS):
        batch = recorded_rows(rollout_id, NUM_GROUPS)
        write_rollout(tmp_path / f"bare_{rollout_id}", batch)
        batch.columns.update(fields_of(batch))
        repeated += sum(int((row == 0).sum()) for row in batch.columns["novelty"])
        write_rollout(tmp_path / f"given_{rollout_id}", batch)
    assert repeated > 0

    def weights(name: str, rows: str, **changes: Any) -> dict[str, torch.Tensor]:
        options = {
            **OPTIONS,
            "load_debug_rollout_data": str(tmp_path / f"{rows}_{{rollout_id}}"),
            "custom_loss_function_path": f"{FILE}:weighted",
            "rollout_batch_size": NUM_GROUPS,
        }
        args = options_in(tmp_path / name, **{**options, **changes})
        assert train(args).steps == STEPS
        return load_file(Path(args.run_dir) / "hf" / "model.safetensors")

    (tmp_path / "mortal.py").write_text(MORTAL)
    (tmp_path / "twice.py").write_text(TWICE)
    twice = {"role_path": [f"{FILE}:Novelty", f"{tmp_path / 'twice.py'}:Twice"]}
    mortal = {"role_path": [f"{tmp_path / 'mortal.py'}:Mortal", f"{FILE}:Brevity"], "progress": "plain"}
    ways: dict[str, Any] = {"lockstep": ROLES, "fused, streamed": {**ROLES, **STREAMED}, "killed": mortal | STREAMED}
    ways |= {"two passes": twice, "two passes, streamed": twice | STREAMED}
    given = weights("given", "given")
    for way, changes in ways.items():
        for name, tensor in weights(way, "bare", **changes).items():
            assert torch.equal(tensor, given[name]), (way, name)
    assert list((tmp_path / "fused, streamed").rglob("novelty+brevity_0.log"))
    assert len(list(tmp_path.rglob("died"))) == 3
    said = capfd.readouterr().out
    assert "novelty died and is replaced (1 of 2)" in said
    assert "brevity died and is replaced (1 of 2)" in said
