"""The quickstart's task with ``--train-backend megatron``: it learns, and engine and trainer agree in each step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.observe.gains import eval_gains
from buffer_rl.observe.metrics import read_metrics

pytestmark = [pytest.mark.megatron, pytest.mark.ray, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
TIMEOUT_S = 1500


def test_the_quickstart_learns_and_engine_and_trainer_agree_in_every_step(tmp_path: Path) -> None:
    """Of two engines that have a checksum each. The run ends early, once it has learned enough."""

    def run(*command: str) -> None:
        subprocess.run([sys.executable, *command], check=True, timeout=TIMEOUT_S, cwd=ROOT)

    data, model = tmp_path / "data", str(tmp_path / "model")
    run(str(QUICKSTART / "prepare.py"), "--output", str(tmp_path))
    common = ["-m", "buffer_rl.cli", "train", "--progress", "plain", "--prompt-data", str(data / "train.jsonl")]
    dev, heldout = f"dev={data / 'dev.jsonl'}", f"heldout={data / 'heldout.jsonl'}"
    warm = ["--run-dir", str(tmp_path / "sft"), "--hf-checkpoint", model, "--eval-prompt-data", dev]
    run(*common, "--config", str(QUICKSTART / "sft.yaml"), *warm)
    megatron = ["--train-backend", "megatron", "--num-train-ranks", "1", "--schedule", "lockstep"]
    checks = ["--max-logprob-diff", "1e-5", "--check-weight-update-equal"]
    own = ["--run-dir", str(tmp_path / "run"), "--hf-checkpoint", str(tmp_path / "sft" / "hf")]
    own += ["--eval-prompt-data", heldout, "--eval-interval", "10", "--early-stop", "eval/heldout>=0.5"]
    run(*common, "--config", str(QUICKSTART / "train.yaml"), *own, *megatron, *checks)
    lines: list[dict[str, Any]] = list(read_metrics(tmp_path / "run"))
    (gain,) = eval_gains(lines)
    assert gain.gain >= 0.25, gain
    steps = [line for line in lines if line["kind"] == "train"]
    gaps = [line["train/train_rollout_logprob_abs_diff"] for line in steps]
    assert len(gaps) == gain.last_step
    assert max(gaps) < 1e-6
    print(json.dumps({"steps": len(steps), "before": gain.before, "after": gain.after, "largest gap": max(gaps)}))
