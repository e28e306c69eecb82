"""What shared memory this process holds, and processes that share some."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buffer_rl.weights.shared_memory import NAME


def held_by(pid: int | str) -> int:
    """How many memory files of weights a process has open."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:  # the descriptor of the listing itself
            continue
    return sum(NAME in link for link in links)


@pytest.fixture
def no_memory_left() -> Iterator[None]:
    """After the test this process holds as little shared memory as before; the memory has no name in a folder."""
    before = held_by("self")
    yield
    assert held_by("self") == before


@pytest.fixture
def start_sharing() -> Iterator[Callable[[str], tuple[subprocess.Popen[str], str]]]:
    """Starts a process that runs ``code``, which prints one line and is then kept alive; gives it and the line."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> tuple[subprocess.Popen[str], str]:
        script = f"import sys\n{code}\nsys.stdout.flush()\nsys.stdin.read()\n"
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline()

    yield start
    for process in started:
        process.kill()
        process.communicate()
