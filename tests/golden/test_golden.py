"""The golden runs that must end with equal weights do (see ``runs.py``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from golden.mutants import MUTANTS, ROOT


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_that_must_end_with_equal_weights_do() -> None:
    command = [sys.executable, str(Path(__file__).with_name("runs.py")), "check"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=1190, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-2000:]
    assert "23 golden runs are as they must be" in answer.stdout


def test_the_text_of_each_mutant_is_once_in_its_file() -> None:
    texts = {mutant.old: (ROOT / mutant.file).read_text(encoding="utf-8") for mutant in MUTANTS}
    assert {old: text.count(old) for old, text in texts.items()} == dict.fromkeys(texts, 1)
