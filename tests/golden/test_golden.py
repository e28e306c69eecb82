"""The golden runs that must end with equal weights do (see ``runs.py``)."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from golden.mutants import MUTANTS
from harness.mutants import ROOT, Mutant

SAMPLE = (
    *("lockstep", "roles", "distributed", "resumed"),
    *("ppo", "ppo_streamed", "tensor_parallel_killed", "over_sampling"),
)
"""One of each mechanism that whole runs alone show: roles, a process group of weights, a resume, a critic, ranks, a
Buffer that is killed. The equalities of the others are integration tests too; ``make golden`` makes all runs."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("forked_processes")
def test_a_sample_of_runs_that_must_end_with_equal_weights_does() -> None:
    command = [sys.executable, str(Path(__file__).with_name("runs.py")), "check", "--only", *SAMPLE]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=1190, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-2000:]
    assert f"{len(SAMPLE)} golden runs are as they must be" in answer.stdout


DRILL_MUTANTS = runpy.run_path(str(ROOT / "benchmarks" / "drill_mutants.py"))["MUTANTS"]


@pytest.mark.parametrize("mutant", [*MUTANTS, *DRILL_MUTANTS], ids=lambda mutant: mutant.name)
def test_the_text_of_each_mutant_is_once_in_its_file(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
