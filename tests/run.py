"""Runs the tests in two pytest processes at once, which take about as long as each other. The first has those that need
Ray, which share a cluster.

    python tests/run.py [pytest arguments]

Where an argument is a path, one process runs it as pytest alone would. The output of the process that ends later is
shown as it comes, that of the other one before it. The status is 0 only if both passed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = (
    *("tests/integration", "tests/conformance", "tests/gpu"),
    *("tests/unit/engine", "tests/unit/weights", "tests/unit/plugins"),
)
HALVES = (FIRST, ("tests/unit", "tests/golden", *(f"--ignore={path}" for path in FIRST)))
NO_TESTS = 5  # pytest's status where nothing is selected
POLL_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if any(not arg.startswith("-") and (ROOT / arg.partition("::")[0]).exists() for arg in args):
        return subprocess.run(_command(args), cwd=ROOT, check=False).returncode
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        logs = [Path(folder, f"{number}.log") for number in range(len(HALVES))]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for half, log in zip(HALVES, logs, strict=True):
                with log.open("wb") as output:
                    command = _command([*half, *args])
                    running.append(subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT))
            _follow(running, logs)
        finally:
            for process in running:
                if process.poll() is None:
                    process.terminate()
                    process.wait(60)
        statuses = [process.returncode for process in running]
    print(f"both halves took {time.monotonic() - started:.0f} s; statuses {statuses}", flush=True)
    if all(status == NO_TESTS for status in statuses):
        return NO_TESTS
    return max(0 if status == NO_TESTS else abs(status) for status in statuses)


def _command(args: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *args]


def _follow(running: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    """Show the whole output of a half once it has ended, and from then on that of the other as it comes."""
    shown = [0] * len(logs)
    order: list[int] = []
    while len(order) < len(running):
        time.sleep(POLL_S)
        ended = [number for number, process in enumerate(running) if process.poll() is not None]
        order += [number for number in ended if number not in order]
        for number in order or ():
            shown[number] = _show(logs[number], shown[number])
        if order and len(order) < len(running):
            other = next(number for number in range(len(running)) if number not in order)
            shown[other] = _show(logs[other], shown[other])


def _show(log: Path, start: int) -> int:
    with log.open("rb") as file:
        file.seek(start)
        text = file.read()
    os.write(sys.stdout.fileno(), text)
    return start + len(text)


if __name__ == "__main__":
    sys.exit(main())
