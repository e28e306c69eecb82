"""The golden runs that must end with equal weights do (see ``runs.py``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_that_must_end_with_equal_weights_do() -> None:
    command = [sys.executable, str(Path(__file__).with_name("runs.py")), "check"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=1190, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-2000:]
    assert "22 golden runs are as they must be" in answer.stdout
