"""The comparisons with a checkout of slime, which is not a part of this repository: SLIME_CHECKOUT names its folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("SLIME_CHECKOUT", "")
TESTS = Path(__file__).parents[2]


@pytest.mark.skipif(not CHECKOUT, reason="SLIME_CHECKOUT names no checkout of slime")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", ["slime_examples.py", "slime_scripts.py", "slime_graders.py"])
def test_a_comparison_finds_nothing_new(script: str) -> None:
    if script == "slime_graders.py" and importlib.util.find_spec("pylatexenc") is None:
        pytest.skip("slime's graders need pylatexenc, which is not installed")
    command = [sys.executable, str(TESTS / script), CHECKOUT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
