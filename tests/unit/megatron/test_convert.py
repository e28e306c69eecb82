"""``buffer-rl convert``, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from buffer_rl.testing.tiny import make_tiny_model
from harness.megatron_continued import in_own_process, saved_on_cpu
from harness.megatron_ranks import HAS_MEGATRON, REASON

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not HAS_MEGATRON, reason=REASON),
    pytest.mark.timeout(300),
]


def convert(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "buffer_rl.cli", "convert", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def test_a_model_goes_to_torch_dist_and_back(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    origin, middle, back = (str(tmp_path / name) for name in ("origin", "torch_dist", "back"))
    make_tiny_model(origin, "qwen3_moe")
    done = convert("--hf-checkpoint", origin, "--output", middle, "--make-vocab-size-divisible-by", "16")
    assert done.returncode == 0, done.stderr
    assert Path(middle, "latest_checkpointed_iteration.txt").read_text() == "release"
    done = convert("--hf-checkpoint", origin, "--load", middle, "--output", back)
    assert done.returncode == 0, done.stderr
    expected, found = (load_file(Path(folder, "model.safetensors")) for folder in (origin, back))
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)
    AutoModelForCausalLM.from_pretrained(back)
    assert AutoTokenizer.from_pretrained(back).decode([3]) == AutoTokenizer.from_pretrained(origin).decode([3])


def test_a_checkpoint_of_a_run_becomes_a_folder_of_its_weights(tmp_path: Path) -> None:
    """Of a trainer, with its optimizer's state; embeddings are tied."""
    origin = make_tiny_model(tmp_path / "origin", "qwen3", num_hidden_layers=2)
    step = tmp_path / "saves" / "step_000001"
    (step / "trainer").mkdir(parents=True)
    weights = in_own_process(saved_on_cpu, origin, str(step / "trainer"))
    done = convert("--hf-checkpoint", origin, "--load", str(step / "trainer"), "--output", str(tmp_path / "back"))
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == weights.keys() == load_file(Path(origin, "model.safetensors")).keys()
    assert all(found[name].equal(weights[name]) for name in found)
    for folder in (step, step.parent):
        done = convert("--hf-checkpoint", origin, "--load", str(folder), "--output", str(tmp_path / "none"))
        assert f"hint: --load {step / 'trainer'}" in done.stderr


def test_a_folder_without_a_checkpoint_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    origin = make_tiny_model(tmp_path / "origin", "qwen3")
    done = convert("--hf-checkpoint", origin, "--load", origin, "--output", str(tmp_path / "back"))
    assert "this is no torch_dist checkpoint" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["origin"]
