"""A drill on a live configuration, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.faulty_runs import make_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_configuration_gets_its_certificate(tmp_path: Path) -> None:
    make_task(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "run_dir: ${here}/run\nhf_checkpoint: ${here}/model\nprompt_data: ${here}/train.jsonl\n"
        "custom_rm_path: ${here}/letters.py:count_a\nnum_rollout: 100\nrollout_batch_size: 3\n"
        "n_samples_per_prompt: 4\nrollout_max_response_len: 6\nlr: 0.01\ndeterministic: true\n"
        "engine_max_running_requests: 16\nengine_context_length: 64\nrm_timeout_s: 3\n"
    )
    command = ["drill", "--config", str(tmp_path / "run.yaml"), "--drill-faults", "kill", "cut", "reward"]
    answer = subprocess.run(
        [sys.executable, "-m", "buffer_rl", *command], capture_output=True, text=True, timeout=580, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    said = [line for line in answer.stdout.splitlines() if line.startswith("run ")]
    assert [line.partition(";")[0] for line in said] == [
        "run 1 of 2, with 5 faults of processes", "run 2 of 2, with a reward that fails"
    ]  # fmt: skip
    facts = json.loads((tmp_path / "run-drill" / "certificate.json").read_text())
    assert facts["passed"] is True
    assert facts["equal_bits"] is True
    assert facts["survived"] == facts["found"] == facts["faults"] == len(facts["rows"])
    faults = " ".join(row["fault"] for row in facts["rows"])
    for part in ("rollout worker killed", "Buffer killed", "trainer rank killed", "engine killed", "router cut off"):
        assert part in faults
    assert "reward: " in faults
    assert (tmp_path / "run-drill" / "certificate.html").exists()
