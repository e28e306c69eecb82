"""Every benchmark works in its shortest form, where that takes seconds."""

from __future__ import annotations

import importlib.util
import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from harness.scripts import start_script

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
TIMEOUT_S = 240.0
SHORTEST: dict[str, tuple[str, ...]] = {
    "agents": ("--quick",),
    "algorithms": ("--quick", "--output", "runs"),
    "asynchrony": ("--quick",),
    "difficulty": ("--quick", "--output", "results"),
    "faults": ("rollout", "--kills", "1"),
    "finish_depth": (),
    "gpu": ("--dry-run", "--output", "table", "--only", "trainer 0.6B, bf16"),
    "group_costs": ("--groups", "1000", "--rounds", "1", "--parts", "queue"),
    "ledger": ("--groups", "1000"),
    "ledger_kills": ("--kills", "2", "--every", "50"),
    "many_devices": ("--quick",),
    "memory": ("--quick", "--only", "LoRA, split, 2 ranks"),
    "pool": ("--quick",),
    "preflight": ("--gb", "0.005"),
    "rollout_workers": ("--quick",),
    "run": ("--quick",),
    "schedule_campaign": ("--runs", "20"),
    "schedule_equality": ("--algorithms", "gspo", "--steps", "1"),
    "schedule_step": ("--quick",),
    "schedules": ("--quick",),
    "staleness": ("--quick", "--output", "results"),
    "start": ("--runs", "1", "--trl-python", "none"),
    "vocabulary": ("--quick", "--trl-python", "none"),
    "two_cores": ("--quick", "--output", "results"),
}
LONG = {"algorithms", "faults", "gpu", "staleness", "two_cores", "vocabulary"}
"""Together half of the time of all: of the campaign."""


def run(name: str, flags: tuple[str, ...], folder: Path) -> None:
    """In a process that is forked, as most benchmarks import torch; and so are the processes of their runs."""
    script = [str(BENCHMARKS / f"{name}.py"), *flags]
    with (folder / "output").open("w+b") as output:
        process = start_script(script, output.fileno(), {"OMP_NUM_THREADS": "1"})
        try:
            status = process.wait(TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        shown = output.read().decode(errors="replace").strip()
    assert status == 0, shown[-6000:]
    assert shown


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_processes: None) -> Path:
    """The folder that the benchmark runs in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.campaign] if name in LONG else []) for name in SHORTEST]
)
def test_a_benchmark_works_in_its_shortest_form(name: str, folder: Path) -> None:
    run(name, SHORTEST[name], folder)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: make bench-trl installs it")
def test_the_comparison_with_trl_works_in_its_shortest_form(folder: Path) -> None:
    run("against_trl", ("--quick", "--output", "results"), folder)


def test_every_benchmark_that_can_be_started_is_among_them() -> None:
    parts = {Path(name).stem for name, _ in runpy.run_path(str(BENCHMARKS / "run.py"))["QUICK"]}
    children = {"comparison_ours", "comparison_trl", "pool_transfer_queue"}  # of against_trl and pool
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    # plan needs the quickstart's warmed-up model, harnesses the packages of others.
    long = {"against_trl", "campaign", "drill_mutants", "harnesses", "plan"}
    assert SHORTEST.keys() | parts | children | long == scripts


def test_every_part_of_the_campaign_is_among_them_or_a_golden_run(script: Callable[[str], ModuleType]) -> None:
    """The campaign itself writes a page of an hour's results."""
    files = {command[0] for command in script("campaign").CAMPAIGNS.values()}
    assert {Path(file).stem for file in files if file.startswith("benchmarks/")} <= SHORTEST.keys()
    assert {file for file in files if not file.startswith("benchmarks/")} == {
        "tests/golden/runs.py", "tests/golden/mutants.py",
    }  # fmt: skip
