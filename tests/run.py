"""Runs the tests in three pytest processes at once, which take about as long as each other and wait a third of their
time. The first has those that share a Ray cluster.

    python tests/run.py [--all] [--processors] [pytest arguments]

``--all``: the slow ones too. ``--processors``: the numerical ones alone, in one process as on a processor with AVX2 and
no AVX-512, in the other as on one without AVX. Where an argument is a path, one process runs it as pytest alone would,
or with ``--processors`` both. The output of the first is shown as it comes, then that of the others. The status is 0
only if all passed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITH_RAY = ("tests/integration", "tests/gpu")
ALONE = (
    *(f"tests/integration/test_{name}.py" for name in ("drill", "nodes", "python_api", "stopping", "your_own_task")),
    *("tests/conformance", "tests/golden"),
    *(f"tests/unit/{name}" for name in ("benchmarks", "code", "engines", "weights")),
)
"""Of the third process: runs that start a cluster of their own, and enough unit tests to take as long as the others."""
FAST = "not slow and not sglang and not verifiers and not megatron"
ALL = "not campaign and not sglang and not verifiers and not megatron"
EMBEDDED = "tests/unit/embedded"
OF_SERVERS = (
    *("engine_thread", "generate_route", "openai_routes", "released_memory", "server", "sglang_service", "stand_in"),
    *("imitated_update", "streams", "weight_groups", "weight_update"),
)
NUMERICAL = (
    *("tests/unit/algo", "tests/unit/plan", "tests/unit/trainer", EMBEDDED, "tests/unit/megatron"),
    *("tests/unit/examples/test_losses.py", "tests/unit/examples/test_trainer_backends.py"),
    *(f"--ignore={EMBEDDED}/test_{name}.py" for name in OF_SERVERS),
    "--ignore=tests/unit/plan/test_flops.py",
    "--ignore=tests/unit/trainer/test_rendezvous.py",
)
# The kernels of torch itself, of MKL and of oneDNN that such a processor has. Each of them rounds in its own way.
PROCESSORS: Mapping[str, Mapping[str, str]] = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE4.1": {
        **{"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
        "TEST_MOST_RANKS": "2",
    },
}
NOT_ON = {
    "AVX2": ("tests/unit/trainer/test_lora.py", "tests/unit/trainer/test_sharding.py"),
    "SSE4.1": ("tests/unit/megatron", "tests/unit/examples/test_trainer_backends.py"),
}
"""Tests that start ranks take long: one of the two processors is enough for each."""
NO_TESTS = 5  # pytest's status where nothing is selected
POLL_S = 0.2
ENDS_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    as_others = "--processors" in args
    args = ["-m", ALL if "--all" in args else FAST, *(arg for arg in args if arg not in ("--all", "--processors"))]
    has_path = any(not arg.startswith("-") and (ROOT / arg.partition("::")[0]).exists() for arg in args)
    if has_path and not as_others:
        return subprocess.run(_command(args), cwd=ROOT, check=False).returncode
    runs: list[tuple[Sequence[str], Mapping[str, str]]] = [(paths, {}) for paths in parts()]
    if as_others:
        runs = [(() if has_path else _numerical(name), variables) for name, variables in PROCESSORS.items()]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        logs = [Path(folder, f"{number}.log") for number in range(len(runs))]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for (paths, variables), log in zip(runs, logs, strict=True):
                with log.open("wb") as output:
                    output.write("".join(f"{name}={value}\n" for name, value in variables.items()).encode())
                    output.flush()
                    command, environ = _command([*paths, *args]), _environment() | variables
                    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT)
                    running.append(process)
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
    print(f"all took {time.monotonic() - started:.0f} s; statuses {statuses}", flush=True)
    if all(status == NO_TESTS for status in statuses):
        return NO_TESTS
    return max(0 if status == NO_TESTS else abs(status) for status in statuses)


def parts() -> tuple[Sequence[str], ...]:
    """The folders and files of each process, as arguments of pytest."""
    others = [f"--ignore={path}" for path in ALONE]
    return [*WITH_RAY, *others], ["tests/unit", *others], ALONE


def _numerical(processor: str) -> Sequence[str]:
    left_out = NOT_ON[processor]
    return [*(path for path in NUMERICAL if path not in left_out), *(f"--ignore={path}" for path in left_out)]


def _environment() -> dict[str, str]:
    """This process's, but that modules are compiled once, though hundreds of processes import them."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


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
