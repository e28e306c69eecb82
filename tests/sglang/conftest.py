"""Real SGLang servers on the CPU, and the quickstart's task in a folder of the test session.

``make test-sglang`` installs the servers and sets SGLANG_PYTHON, the Python of their environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
SHARED = Path("/dev/shm")
STEPS = 20
TIMEOUT_S = 900


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "buffer_rl.cli", *arguments]


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The Python that has SGLang."""
    if not (found := os.environ.get("SGLANG_PYTHON")):
        pytest.fail("SGLANG_PYTHON does not name the Python of an environment with SGLang: run make test-sglang")
    return found


@pytest.fixture(scope="session")
def warm() -> Path:
    """The quickstart's data and its model after the supervised warm-up; made once a checkout."""
    folder = QUICKSTART / "build"
    if not (folder / "sft" / "hf").is_dir():
        subprocess.run([sys.executable, str(QUICKSTART / "prepare.py")], check=True, timeout=TIMEOUT_S)
        subprocess.run(command("train", "--config", str(QUICKSTART / "sft.yaml")), check=True, timeout=TIMEOUT_S)
    return folder


@pytest.fixture(scope="session")
def start(warm: Path, sglang_python: str) -> Callable[..., subprocess.Popen[str]]:
    """``start(folder, *flags)``: a run of the quickstart's task with SGLang servers."""

    def begin(folder: Path, *flags: str) -> subprocess.Popen[str]:
        common = ["--config", str(QUICKSTART / "train.yaml"), "--run-dir", str(folder), "--num-rollout", str(STEPS)]
        common += ["--num-train-ranks", "1", "--rollout-num-engines", "1", "--engine-max-running-requests", "64"]
        common += ["--skip-eval-before-train", "--eval-interval", "1000", "--progress", "plain"]
        common += ["--rollout-engine", "sglang", "--sglang-python", sglang_python]
        run = command("train", *common, *flags)
        return subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)

    return begin


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Afterwards there is no more in shared memory than before, and no server runs."""
    before = set(SHARED.iterdir())
    yield
    assert set(SHARED.iterdir()) - before == set()
    assert servers() == []


def servers() -> list[int]:
    """The process ids of SGLang servers, without those that they started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"buffer_rl_sglang/server_process.py") for word in words) and b"--port" in words:
            found.append(int(folder.name))
    return sorted(found)


def metrics_of(folder: Path, name: str) -> list[float]:
    """A metric of each step."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [float(row[name]) for row in rows if name in row]
