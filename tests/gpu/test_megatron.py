"""The Megatron trainer on GPUs: TransformerEngine's layers, nccl, and the memory that a sleeping trainer gives back."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from buffer_rl.testing.tiny import make_tiny_model
from harness.megatron_continued import check_that_it_goes_on, check_that_sleep_changes_nothing, in_own_process
from harness.megatron_ranks import HAS_MEGATRON, REASON

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(not HAS_MEGATRON, reason=REASON),
    pytest.mark.timeout(900),
]
HAS_TE = importlib.util.find_spec("transformer_engine") is not None
NEEDS_TE = pytest.mark.skipif(not HAS_TE, reason="TransformerEngine is not installed")
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two CUDA devices")
TE = ("--transformer-impl", "transformer_engine", "--bf16")
TWO = ("--num-train-ranks", "2")
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "local": ("qwen3", ()),
    "te": ("qwen3", TE),
    "local TP2": ("qwen3", (*TWO, "--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "te TP2": ("qwen3", (*TE, *TWO, "--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "local PP2": ("qwen3", (*TWO, "--pipeline-model-parallel-size", "2")),
    "local DP2": ("qwen3", (*TWO, "--overlap-grad-reduce", "--overlap-param-gather")),
    "local CP2": ("qwen3", (*TWO, "--context-parallel-size", "2")),
    "te CP2": ("qwen3", (*TE, *TWO, "--context-parallel-size", "2")),
    "te CP2, padded": ("qwen3", (*TE, *TWO, "--context-parallel-size", "2", "--qkv-format", "bshd")),
    "te EP2": ("qwen3_moe", (*TE, *TWO, "--expert-model-parallel-size", "2", "--moe-grouped-gemm")),
}
CASES = [
    pytest.param(name, marks=[*([NEEDS_TE] if TE[0] in flags else []), *([NEEDS_TWO] if TWO[0] in flags else [])])
    for name, (_, flags) in LAYOUTS.items()
]


@pytest.mark.parametrize("layout", CASES)
def test_engine_and_trainer_agree_in_each_step(layout: str, tmp_path: Path) -> None:
    """The engine computes with transformers' weights, which the ranks gather after each step."""
    architecture, own = LAYOUTS[layout]
    model = make_tiny_model(tmp_path / "model", architecture, hidden_size=128, intermediate_size=256)
    words = ("ab", "ba", "abc", "bca", "cab", "acb", "bb", "cc")
    rows = [{"prompt": f"{word}=", "label": word[::-1]} for word in words]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "letters.py").write_text("def count_a(args, sample):\n    return sample.response.count('a')\n")
    flags = {
        "--run-dir": tmp_path / "run",
        "--hf-checkpoint": model,
        "--prompt-data": tmp_path / "train.jsonl",
        "--custom-rm-path": f"{tmp_path / 'letters.py'}:count_a",
        "--train-backend": "megatron",
        "--num-rollout": 5,
        "--rollout-batch-size": 8,
        "--n-samples-per-prompt": 8,
        "--rollout-max-response-len": 16,
        "--lr": 1e-3,
    }
    command = [str(word) for pair in flags.items() for word in pair]
    subprocess.run([sys.executable, "-m", "buffer_rl.cli", "train", *command, *own], check=True, timeout=800)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    name = "train/train_rollout_logprob_abs_diff"
    differences = [line[name] for line in lines if name in line]
    assert len(differences) == 5
    assert max(differences) < (0.05 if "--bf16" in own else 1e-3)


@NEEDS_TE
def test_a_checkpoint_of_local_layers_and_torchs_adam_goes_on_with_transformer_engine(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    check_that_it_goes_on(model, tmp_path, {"train_device": "cuda", "transformer_impl": "transformer_engine"})


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "whole optimizer"])
def test_a_sleeping_trainer_gives_its_memory_back_and_goes_on_as_it_was(distributed: bool, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    in_own_process(check_that_sleep_changes_nothing, model, distributed)
