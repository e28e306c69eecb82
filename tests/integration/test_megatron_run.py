"""A sample of ``tests/megatron``: a whole run on Megatron ranks, from its plugin's entry point to a later layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.options.section import compose
from buffer_rl.verbs.train import sections_of
from harness.megatron_ranks import HAS_MEGATRON, REASON
from harness.trainers import LARGE_EPS

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_MEGATRON, reason=REASON),
    pytest.mark.timeout(300),
]


def test_a_run_on_two_tensor_ranks_goes_on_with_two_stages(
    train: Callable[[Any], Any], options_in: Callable[..., Any], tmp_path: Path
) -> None:
    """Engines get the gathered weights after each step; each step's checkpoint is written beside the next one."""
    megatron = {
        "train_backend": "megatron",
        "train_device": "cpu",
        "num_train_ranks": 2,
        "deterministic": True,
    } | LARGE_EPS

    def options(name: str, **changes: Any) -> Any:
        given = options_in(tmp_path / name).model_dump(exclude_unset=True)
        return compose(sections_of([]))(**{**given, **megatron, **changes})

    saves = {"save": str(tmp_path / "saves"), "save_interval": 1, "async_save": True}
    first = options("first", tensor_model_parallel_size=2, sequence_parallel=True, num_rollout=3, **saves)
    assert train(first).steps == 3
    gaps = {}
    for name, source in (("same", {"tensor_model_parallel_size": 2}), ("stages", {"pipeline_model_parallel_size": 2})):
        args = options(name, num_rollout=3, load=str(tmp_path / "saves" / "step_000002"), **source)
        assert train(args).steps == 3
        ours, theirs = (load_file(Path(each.run_dir, "hf", "model.safetensors")) for each in (args, first))
        gaps[name] = max(float((ours[key] - theirs[key]).abs().max()) for key in theirs)
    assert max(gaps.values()) < 1e-5
    lines = [json.loads(line) for line in Path(first.run_dir, "metrics.jsonl").read_text().splitlines()]
    differences = [line["train/train_rollout_logprob_abs_diff"] for line in lines if line["kind"] == "train"]
    assert len(differences) == 3
    assert max(differences) < 1e-5
    start = load_file(Path(first.hf_checkpoint, "model.safetensors"))
    assert all(not torch.equal(theirs[key], start[key]) for key in start)
