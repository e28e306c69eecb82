"""Real SGLang servers on a GPU: weights by CUDA's handles and by nccl. Needs SGLANG_PYTHON, the Python of an
environment with SGLang (plugins/README.md), and two GPUs for nccl, which takes one device a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from buffer_rl.testing.tiny import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif("SGLANG_PYTHON" not in os.environ, reason="SGLANG_PYTHON does not name a Python with SGLang"),
    pytest.mark.timeout(900),
]
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two CUDA devices")


@pytest.mark.parametrize(
    "mode",
    ["disk", "tensor", pytest.param("distributed", marks=NEEDS_TWO)],
)
def test_engine_and_trainer_agree_on_a_gpu(mode: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    rows = [
        {"prompt": f"{word}=", "label": word[::-1]} for word in ("ab", "ba", "abc", "bca", "cab", "acb", "bb", "cc")
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "letters.py").write_text("def count_a(args, sample):\n    return sample.response.count('a')\n")
    flags = {
        "--run-dir": tmp_path / "run",
        "--hf-checkpoint": model,
        "--prompt-data": tmp_path / "train.jsonl",
        "--custom-rm-path": f"{tmp_path / 'letters.py'}:count_a",
        "--num-rollout": 5,
        "--rollout-batch-size": 8,
        "--n-samples-per-prompt": 8,
        "--rollout-max-response-len": 16,
        "--rollout-engine": "sglang",
        "--sglang-python": os.environ["SGLANG_PYTHON"],
        "--sglang-mem-fraction-static": 0.3,
        "--engine-device": "cuda",
        "--train-device": "cuda",
        "--weight-sync-mode": mode,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    subprocess.run([sys.executable, "-m", "buffer_rl.cli", "train", *words], check=True, timeout=800)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    name = "train/train_rollout_logprob_abs_diff"
    differences = [line[name] for line in lines if name in line]
    assert len(differences) == 5
    assert max(differences) < 1e-4
