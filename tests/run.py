"""Runs the tests in two pytest processes at once, which take about as long as each other. The first has those that need
Ray, which share a cluster.

    python tests/run.py [--all] [pytest arguments]

``--all``: the slow ones too. Where an argument is a path, one process runs it as pytest alone would. The output of the
first is shown as it comes, then that of the other one. The status is 0 only if both passed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITH_RAY = ("tests/integration", "tests/conformance", "tests/gpu")
FAST = "not slow and not sglang and not megatron"
ALL = "not campaign and not sglang and not megatron"
NO_TESTS = 5  # pytest's status where nothing is selected
POLL_S = 0.2
ENDS_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    with_slow = "--all" in args
    args = ["-m", ALL if with_slow else FAST, *(arg for arg in args if arg != "--all")]
    if any(not arg.startswith("-") and (ROOT / arg.partition("::")[0]).exists() for arg in args):
        return subprocess.run(_command(args), cwd=ROOT, check=False).returncode
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        logs = [Path(folder, f"{number}.log") for number in range(2)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for half, log in zip(halves(with_slow), logs, strict=True):
                with log.open("wb") as output:
                    command = _command([*half, *args])
                    running.append(subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT))
            _follow(running, logs)
        finally:
            for process in running:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)  # pytest ends what the tests started
            for process in running:
                try:
                    process.wait(ENDS_S)
                except subprocess.TimeoutExpired:  # in the background of a shell it ignores SIGINT
                    process.kill()
        statuses = [process.returncode for process in running]
    print(f"both halves took {time.monotonic() - started:.0f} s; statuses {statuses}", flush=True)
    if all(status == NO_TESTS for status in statuses):
        return NO_TESTS
    return max(0 if status == NO_TESTS else abs(status) for status in statuses)


def halves(with_slow: bool) -> tuple[Sequence[str], Sequence[str]]:
    """The folders of each process, as arguments of pytest."""
    if with_slow:
        return (*WITH_RAY, "tests/golden"), ("tests/unit",)
    beside = [f"tests/unit/{name}" for name in ("engine", "weights", "plugins")]
    return (*WITH_RAY, *beside), ("tests/unit", *(f"--ignore={path}" for path in beside), "tests/golden")


def _command(args: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *args]


def _follow(running: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    """Show the output of each as it comes, one after the other; returns when all have ended."""
    for process, log in zip(running, logs, strict=True):
        shown, ended = 0, False
        while not ended:
            time.sleep(POLL_S)
            ended = process.poll() is not None
            shown = _show(log, shown)


def _show(log: Path, start: int) -> int:
    with log.open("rb") as file:
        file.seek(start)
        text = file.read()
    os.write(sys.stdout.fileno(), text)
    return start + len(text)


if __name__ == "__main__":
    sys.exit(main())
