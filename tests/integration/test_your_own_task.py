"""``docs/your_own_task.md``, typed as it stands: each command does what the page shows, up to numbers."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from buffer_rl.observe.metrics import read_metrics

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "your_own_task.md"
CTRL_C = "^C"
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"


@dataclass(slots=True)
class Typed:
    """A command of the page, and the lines below it."""

    command: str
    shown: list[str] = field(default_factory=list)


def commands() -> list[Typed]:
    found: list[Typed] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Typed(line[2:]))
            elif line != "...":
                found[-1].shown.append(line)
    return found


def pattern(line: str) -> re.Pattern[str]:
    """What an output line must be: the line of the page, with any numbers, and anything in place of ``...``."""
    parts = [NUMBER.join(map(re.escape, re.split(NUMBER, part))) for part in line.split("...")]
    return re.compile(".*".join(parts))


def missing(shown: list[str], output: list[str]) -> str | None:
    """The first line of the page that is not in the output, after those before it."""
    rest = iter(output)
    for line in shown:
        if not any(pattern(line).fullmatch(given) for given in rest):
            return line
    return None


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.rstrip("\n").rpartition("\r")[2].rstrip()


def type_in(typed: Typed, folder: Path) -> tuple[int, list[str]]:
    """Run a command; where the page has ``^C``, the group of its processes gets SIGINT once the line above was printed.
    Returns the exit status and the output."""
    environ = {**os.environ, "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}", "COLUMNS": "200"}
    process = subprocess.Popen(
        shlex.split(typed.command),
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    before = typed.shown[: typed.shown.index(CTRL_C)] if CTRL_C in typed.shown else []
    output: list[str] = []
    try:
        for line in lines_of(process):
            output.append(line)
            if before and missing(before, output) is None:
                os.killpg(process.pid, signal.SIGINT)
                before = []
        return process.wait(60), output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_the_page_is_short_and_the_commands_of_the_readme_are_its() -> None:
    assert len(PAGE.read_text(encoding="utf-8").split()) <= 900
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your own task\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, flags=re.DOTALL)
    on_page = [typed.command for typed in commands()]
    assert [command for command in block.splitlines() if command not in on_page] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_page_does_what_the_page_shows(tmp_path: Path) -> None:
    folder, stopped_at = tmp_path, 0
    for typed in commands():
        if typed.command.startswith("cd "):
            folder /= typed.command[3:]
            continue
        began = time.monotonic()
        status, output = type_in(typed, folder)
        print(f"{time.monotonic() - began:6.1f} s  {typed.command}")
        expected = 128 + signal.SIGINT if CTRL_C in typed.shown else 0
        shown = [line for line in typed.shown if line != CTRL_C]
        first = next((line for line in output if line.startswith("step ")), "")
        assert not stopped_at or first.startswith(f"step {stopped_at + 1}/")
        stopped_at = next((int(n) for line in output for n in re.findall(r"SIGINT: (\d+) steps are done", line)), 0)
        assert (status, missing(shown, output)) == (expected, None), "\n".join([f"$ {typed.command}", *output[-40:]])
    records = list(read_metrics(folder / "runs" / "my_task"))
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(260))
    heldout = [record["eval/heldout"] for record in records if record["kind"] == "eval"]
    assert heldout[0] < 0.1
    assert heldout[-1] > 0.6
