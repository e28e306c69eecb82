"""A member notes its calls, and a process writes the stack of its threads, also if it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.cluster.dispatch import To, dispatch, dispatch_of
from buffer_rl.cluster.member import Member, end_process, frames_of, take_stack
from harness.processes import holds_within

CHILD = """
import threading
from buffer_rl.cluster.member import write_stack_at_signal

def train():
    accumulate()

def accumulate():
    print("ready", flush=True)
    {wait}

write_stack_at_signal()
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


class Worker(Member):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def train(self, number: int) -> int:
        self.seen += self.pulse().calls
        return number

    async def run(self, number: int) -> int:
        self.seen += self.pulse().calls
        return number

    @dispatch(To.ONE)
    def fail(self) -> None:
        raise ZeroDivisionError


def test_calls_of_methods_are_noted_and_answer_as_before() -> None:
    worker = Worker()
    assert worker.train(3) == 3
    assert asyncio.run(worker.run(4)) == 4
    with pytest.raises(ZeroDivisionError):
        worker.fail()
    assert [call.method for call in worker.seen] == ["train", "run"]
    assert set(worker.pulse().gaps) == {"train", "run", "fail"}
    assert (worker.pulse().calls, worker.pulse().pid) == ((), os.getpid())
    assert dispatch_of(Worker.fail).to is To.ONE
    assert asyncio.iscoroutinefunction(Worker.run)


@pytest.mark.parametrize(
    ("is_stopped", "stops"), [(True, True), (False, True), (False, False)], ids=["stopped", "blocked", "asked"]
)
def test_a_process_writes_its_stack_and_does_not_go_on_unless_it_is_only_asked(
    is_stopped: bool, stops: bool, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"before\n")
    with log.open("ab") as file:
        code = CHILD.format(wait="threading.Event().wait()")
        child = subprocess.Popen([sys.executable, "-c", code], stdout=file, stderr=file)
    try:
        assert holds_within(60, lambda: b"ready" in log.read_bytes())
        if is_stopped:
            os.kill(child.pid, signal.SIGSTOP)
        stack = take_stack(child.pid, str(log), stops)
        assert "in accumulate" in frames_of(stack, "train")
        assert frames_of(stack, "train").split(" < ")[-1].endswith("in _bootstrap")
        assert stack in log.read_text()
        assert "before" not in stack
        state = Path(f"/proc/{child.pid}/stat")
        assert holds_within(60, lambda: (state.read_text().rpartition(")")[2].split()[0] == "T") == stops)
    finally:
        end_process(child.pid)
        assert child.wait(60) == -signal.SIGKILL
    assert take_stack(child.pid, str(log), True) == ""


def test_the_frames_are_those_of_the_thread_with_the_method_else_of_the_deepest() -> None:
    stack = """
Thread 0x1 (most recent call first):
  File "/a/loss.py", line 3 in wait
  File "/a/rank.py", line 9 in train
Current thread 0x2 (most recent call first):
  File "/a/threading.py", line 1 in wait
  File "/a/threading.py", line 2 in run
  File "/a/threading.py", line 3 in _bootstrap
"""
    assert frames_of(stack, "train") == "loss.py:3 in wait < rank.py:9 in train"
    assert frames_of(stack, "") == "threading.py:1 in wait < threading.py:2 in run < threading.py:3 in _bootstrap"
    assert frames_of("", "train") == ""
