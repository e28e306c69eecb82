"""A run in which one prompt has no reward and one step is not finite: both are left out, written down and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.files.row_file import read_rollout

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

Run = Callable[[Any], Any]
MakeOptions = Callable[..., Any]

REWARD = """
async def score(args, sample):
    if sample.uid.row == 1 and sample.uid.epoch == 0:
        raise KeyError("no answer in this row")
    if sample.uid.row == 4 and sample.uid.epoch == 0:
        return 1e30 * sample.sample_index
    return float(sample.response_length % 3)
"""


@pytest.mark.parametrize("streams", [False, True], ids=["lockstep", "streamed"])
@pytest.mark.slow
def test_a_run_goes_on_without_a_bad_prompt_and_a_bad_step(
    train: Run, make_options: MakeOptions, tmp_path: Path, streams: bool
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    streamed = {"schedule": "pipelined", "stream_gradients": True} if streams else {}
    args = make_options(
        num_rollout=3,
        custom_rm_path=f"{reward}:score",
        rm_type=None,
        grpo_std_normalization=False,
        rollout_shuffle=False,
        eval_prompt_data=[],
        eval_interval=None,
        **streamed,
    )
    assert train(args).steps == 3
    folder = Path(args.run_dir)
    (line,) = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert (line["uid"].split(":")[1:], line["task"], line["attempts"]) == (["1", "0"], "train_0", 2)
    assert "KeyError: 'no answer in this row'" in line["error"]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    counts = [record["train/non_finite_steps"] for record in records if "train/non_finite_steps" in record]
    assert counts[-1] == 1.0
    (file,) = (folder / "non_finite").iterdir()
    rows = read_rollout(file)
    assert 4 in {row.uid.row for row in rows.row_ids}
    assert max(abs(float(value)) for value in rows.columns["reward"]) > 1e29
    weights = load_file(folder / "hf" / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
